"""The SANA family (2410.10629), and SANA-1.5 (2501.18427): linear attention on latents of 32 x 32
pixels.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from diffusers import SanaPipeline
from torch import Tensor, nn

from ebbflow.data.prompts import Prompt
from ebbflow.models.base import Conditioning, Tokens
from ebbflow.models.pipeline import PipelineModel
from ebbflow.models.published import Part, Published
from ebbflow.recipe.families import Family

FAMILY = Family(
    adapter="SanaModel",
    pipeline="SanaPipeline",
    size_multiple=32,
)
INSTRUCTION = (
    inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
)
"""Comes before every prompt, and before no negative prompt."""
SMALL = {
    "num_attention_heads": 36,
    "num_cross_attention_heads": 16,
    "cross_attention_head_dim": 72,
    "cross_attention_dim": 1152,
}
STAGES = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
OTHERS = {
    "text_encoder": Part("transformers", "Gemma2Model", {}),
    "vae": Part(
        "diffusers",
        "AutoencoderDC",
        {
            "encoder_block_types": STAGES,
            "decoder_block_types": STAGES,
            "downsample_block_type": "conv",
            "upsample_block_type": "interpolate",
        },
    ),
}


def _published_parts(bytes: int = 2, **config: Any) -> Mapping[str, Part]:
    """The parts of a model whose network differs from that of the first SANA with 1.6 billion
    parameters in these keys.
    """
    return OTHERS | {
        "transformer": Part("diffusers", "SanaTransformer2DModel", config, bytes=bytes)
    }


PUBLISHED: Published = {
    "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers": _published_parts(
        qk_norm="rms_norm_across_heads"
    ),
    "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers": _published_parts(
        num_layers=60, qk_norm="rms_norm_across_heads"
    ),
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": _published_parts(bytes=4),
    "Efficient-Large-Model/Sana_1600M_1024px_diffusers": _published_parts(bytes=4),
    "Efficient-Large-Model/Sana_1600M_512px_diffusers": _published_parts(bytes=4, sample_size=16),
    "Efficient-Large-Model/Sana_600M_1024px_diffusers": _published_parts(
        bytes=4, num_layers=28, **SMALL
    ),
    "Efficient-Large-Model/Sana_600M_512px_diffusers": _published_parts(
        bytes=4, num_layers=28, sample_size=16, **SMALL
    ),
}


class SanaModel(PipelineModel):
    """Adapter of ``SanaPipeline``; it draws the size that it is asked for, and not one of the
    pipeline's list, scaled.
    """

    pipeline_class = SanaPipeline
    published = PUBLISHED
    lora_targets = [
        f"{attention}.{layer}"
        for attention in ("attn1", "attn2")
        for layer in ("to_q", "to_k", "to_v", "to_out.0")
    ]
    text_parts = ("text_encoder",)
    default_size = (1024, 1024)
    default_max_tokens = 300

    def _compute_latent_shape(self) -> tuple[int, ...]:
        scale = self.pipeline.vae_scale_factor
        self._require_multiple(scale * self.transformer.config.patch_size)
        return (self.transformer.config.in_channels, self.height // scale, self.width // scale)

    def count_tokens(self) -> Tokens:
        # A latent is 32 x 32 pixels, and with a patch size of 1 a token. Text is only attended to.
        image = math.prod(self.latent_shape[1:]) // self.transformer.config.patch_size**2
        return Tokens(image=image, text=self.max_tokens, joint=False)

    def token_widths(self) -> tuple[int, int]:
        config = self.transformer.config
        return config.num_attention_heads * config.attention_head_dim, config.caption_channels

    def compute_sigmas(self, steps: int) -> Tensor:
        """The schedule of the folder's scheduler. The published one takes second-order steps on it,
        at times cut to integers; we take Euler's, at the times as they are.
        """
        self.pipeline.scheduler.set_timesteps(steps)
        sigmas: Tensor = self.pipeline.scheduler.sigmas.clone()
        # Published .9997 at a shift of 3; there the noise of Flow-SDE is fifty times too large.
        sigmas[0] = 1.0
        return sigmas

    def _encode_inputs(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        return self._encode_with_instruction(INSTRUCTION, texts)

    def _encode_negative_inputs(
        self, texts: list[str], prompts: Sequence[Prompt]
    ) -> dict[str, Tensor]:
        # As the pipeline: the instruction asks for a better prompt, which a negative one is not.
        return self._encode_with_instruction([], texts)

    def _encode_with_instruction(
        self, instruction: list[str], texts: list[str]
    ) -> dict[str, Tensor]:
        # embeds [n, L, 2304] of Gemma 2 and their mask [n, L]: the first token and the last L - 1,
        # which cuts the instruction off again.
        embeds, mask, _, _ = self.pipeline.encode_prompt(
            texts,
            do_classifier_free_guidance=False,
            device=self.device,
            max_sequence_length=self.max_tokens,
            complex_human_instruction=instruction,
        )
        return {"embeds": embeds, "mask": mask.bool()}

    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        velocity: Tensor = self.transformer(
            latents,
            encoder_hidden_states=conditioning["embeds"],
            encoder_attention_mask=conditioning["mask"],
            timestep=1000 * sigma * self.transformer.config.timestep_scale,
            return_dict=False,
        )[0]
        return velocity

    def _encode_with_vae(self, pixels: Tensor) -> Tensor:
        # An autoencoder without a distribution, so that there is no mode to take.
        latents: Tensor = self.pipeline.vae.encode(pixels).latent
        return latents

    def list_blocks(self) -> list[nn.Module]:
        return list(self.transformer.transformer_blocks)
