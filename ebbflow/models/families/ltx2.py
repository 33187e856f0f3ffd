"""The LTX-2 family (2601.03233), text to video: pictures alone, without the sound that the pipeline
denoises with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import LTX2Pipeline
from torch import Tensor

from ebbflow.data.prompts import Prompt
from ebbflow.models.base import Conditioning, ModelError
from ebbflow.models.families.ltx_video import LTXVideoModel
from ebbflow.models.published import Part, Published
from ebbflow.recipe.families import Family
from ebbflow.recipe.model import ModelConfig

FAMILY = Family(
    adapter="LTX2Model",
    caveat="pictures are trained, rewarded and evaluated without their sound, and LTX2Pipeline"
    " generates both together: its network predicts other pictures than those that were scored;"
    " look at some of them (docs/models.md, LTX-2 without its sound)",
)
GEMMA3_12B = {
    "text_config": {
        "vocab_size": 262208,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
PUBLISHED: Published = {
    "Lightricks/LTX-2": {
        "transformer": Part("diffusers", "LTX2VideoTransformer3DModel", {}),
        "text_encoder": Part("transformers", "Gemma3ForConditionalGeneration", GEMMA3_12B),
        "connectors": Part("ltx2", "LTX2TextConnectors", {}),
        "vae": Part(
            "diffusers",
            "AutoencoderKLLTX2Video",
            {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8},
        ),
        "audio_vae": Part("diffusers", "AutoencoderKLLTX2Audio", {}),
        "vocoder": Part("ltx2", "LTX2Vocoder", {}),
    },
}
FRAME_RATE = 24
"""Frames per second of the pipeline, in which the network counts time."""


class LTX2Model(LTXVideoModel):
    """Adapter of ``LTX2Pipeline`` with its modalities isolated: pictures do not attend to sound,
    nor sound to pictures.

    So their velocity does not depend on the sound, of which the network gets one token of zeros.
    """

    pipeline_class = LTX2Pipeline
    published = PUBLISHED
    lora_targets = [
        f"{attention}.{layer}"
        for attention in ("attn1", "attn2")
        for layer in ("to_q", "to_k", "to_v", "to_out.0")
    ]
    # The branch of the sound, and what joins it to that of the pictures.
    unused_parameters = ("*audio*", "*a2v*", "av_cross_attn*")
    text_parts = ("text_encoder", "connectors")
    default_size = (512, 768)
    default_max_tokens = 1024

    @classmethod
    def _check_pipeline(cls, pipeline: Any, config: ModelConfig) -> None:
        if pipeline.vae.config.timestep_conditioning:
            raise ModelError(
                f"{config.path} has a VAE that draws noise to decode; take the one of"
                " Lightricks/LTX-2"
            )
        if not pipeline.transformer.config.use_prompt_embeddings:
            raise ModelError(
                f"{config.path} is LTX-2.3 or later, and {config.family} is LTX-2; take"
                " Lightricks/LTX-2"
            )
        # Empty places of a prompt are filled with learned tokens, a whole set at a time.
        registers = pipeline.connectors.config.video_connector_num_learnable_registers or 1
        if config.max_tokens is not None and config.max_tokens % registers:
            near = max(registers, round(config.max_tokens / registers) * registers)
            raise ModelError(
                f"model.max_tokens = {config.max_tokens}: prompts are filled up with {registers}"
                f" learned tokens, over and over; take {near}"
            )

    def _encode_inputs(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        # One at a time: the states of all 49 layers, in several copies, and the scores of 262,208
        # words take gigabytes for each.
        rows = [self._encode_video_text(text) for text in texts]
        return {
            "embeds": torch.cat([embeds for embeds, _ in rows]),
            "mask": torch.cat([mask for _, mask in rows]).bool(),
        }

    def _encode_video_text(self, text: str) -> tuple[Tensor, Tensor]:
        """For the pictures; there are others for the sound."""
        pipeline = self.pipeline
        states, mask = pipeline._get_gemma_prompt_embeds(
            text, max_sequence_length=self.max_tokens, device=self.device
        )
        embeds, _, mask = pipeline.connectors(
            states, mask, padding_side=pipeline.tokenizer.padding_side
        )
        return embeds, mask

    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        config = self.transformer.config
        _, frames, height, width = self.latent_shape
        velocity: Tensor = self.transformer(
            # [N, C, F, H, W] as tokens [N, F H W, C]: a latent is a token.
            hidden_states=latents.flatten(2).mT,
            # One token of silence: the network needs some, and isolate_modalities keeps it apart.
            audio_hidden_states=latents.new_zeros(len(latents), 1, config.audio_in_channels),
            encoder_hidden_states=conditioning["embeds"],
            audio_encoder_hidden_states=latents.new_zeros(len(latents), 1, config.caption_channels),
            timestep=1000 * sigma,
            encoder_attention_mask=conditioning["mask"],
            num_frames=frames,
            height=height,
            width=width,
            fps=FRAME_RATE,
            audio_num_frames=1,
            isolate_modalities=True,
            return_dict=False,
        )[0]
        return velocity.mT.reshape(latents.shape)
