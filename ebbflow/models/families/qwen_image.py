"""The Qwen-Image family (2508.02324): text to image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers import QwenImagePipeline
from torch import Tensor, nn

from ebbflow.data.prompts import Prompt
from ebbflow.models.base import Conditioning, ModelError
from ebbflow.models.packed import PackedPipelineModel, pack_latents
from ebbflow.models.pipeline import JOINT_ATTENTION, channel_statistics, match_norm
from ebbflow.models.published import Part, Published
from ebbflow.recipe.families import Family
from ebbflow.recipe.model import ModelConfig

FAMILY = Family(
    adapter="QwenImageModel",
    pipeline="QwenImagePipeline",
    size_multiple=16,
    vllm_omni="ebbflow_vllm_omni.networks:QWEN_IMAGE",
    feature_caches=("first_block", "taylor_seer", "mag"),
)
QWEN_VL_7B: dict[str, Any] = {
    "text_config": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
    },
    "tie_word_embeddings": False,
}
PARTS = {
    "transformer": Part("diffusers", "QwenImageTransformer2DModel", {}),
    "text_encoder": Part("transformers", "Qwen2_5_VLForConditionalGeneration", QWEN_VL_7B),
    "vae": Part("diffusers", "AutoencoderKLQwenImage", {}),
}


class QwenImageModel(PackedPipelineModel):
    """Adapter of ``QwenImagePipeline``: true classifier-free guidance whose result keeps the norm
    of the prompt's prediction.
    """

    pipeline_class = QwenImagePipeline
    published: ClassVar[Published] = {"Qwen/Qwen-Image": PARTS}
    lora_targets = [
        *JOINT_ATTENTION,
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    ]
    text_parts: ClassVar[tuple[str, ...]] = ("text_encoder",)
    default_size = (1024, 1024)
    shares_tokens = True
    # Prompts have no fixed length: context parallelism sets the multiple that divides them.
    text_multiple = 1

    @classmethod
    def _check_pipeline(cls, pipeline: Any, config: ModelConfig) -> None:
        limit = pipeline.tokenizer_max_length
        if config.max_tokens is not None and config.max_tokens > limit:
            raise ModelError(
                f"model.max_tokens = {config.max_tokens}: the pipeline reads {limit} at most; leave"
                " it out"
            )

    def _encode_inputs(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        embeds, mask = self.pipeline.encode_prompt(
            texts, device=self.device, max_sequence_length=self.max_tokens
        )
        return mask_or_none(embeds, mask)

    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        # (frames, rows, columns) of tokens, from which the network computes rotary positions.
        _, height, width = self.latent_shape
        return self._call_transformer(
            pack_latents(latents), sigma, conditioning, [(1, height // 2, width // 2)]
        )

    def _call_transformer(
        self,
        tokens: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        shapes: list[tuple[int, int, int]],
    ) -> Tensor:
        # All padding, and the mask even where it masks nothing: cut to a micro-batch's longest
        # prompt, a row's last bits would depend on the rows beside it, which in bfloat16 moved the
        # first ratio by 5e-4 (python -m benchmarks.precision).
        padding = -conditioning["mask"].shape[1] % self.text_multiple
        velocity: Tensor = self.transformer(
            hidden_states=tokens,
            timestep=sigma,
            # [n, L, D] and [n, L], both filled up to a multiple with what the mask hides.
            encoder_hidden_states=nn.functional.pad(conditioning["embeds"], (0, 0, 0, padding)),
            encoder_hidden_states_mask=nn.functional.pad(conditioning["mask"], (0, padding)),
            img_shapes=[shapes for _ in range(len(tokens))],
            return_dict=False,
        )[0]
        return velocity

    def _apply_guidance(
        self, prediction: Tensor, negative: Tensor, guidance: float | Tensor
    ) -> Tensor:
        # As the pipeline: the norm of each token.
        return match_norm(super()._apply_guidance(prediction, negative, guidance), prediction)

    def _unscale_latents(self, latents: Tensor) -> Tensor:
        # The VAE is one of videos, [N, C, 1, H, W]; here and below an image is its only frame.
        mean, std = channel_statistics(self.pipeline.vae, latents)
        return (latents * std + mean)[:, :, None]

    def _scale_latents(self, latents: Tensor) -> Tensor:
        mean, std = channel_statistics(self.pipeline.vae, latents)
        return ((latents - mean) / std)[:, :, 0]

    def _decode_pixels(self, latents: Tensor) -> Tensor:
        return super()._decode_pixels(latents)[:, 0]

    def _encode_pixels(self, images: Tensor) -> Tensor:
        return super()._encode_pixels(images[:, None])

    def list_blocks(self) -> list[nn.Module]:
        return list(self.transformer.transformer_blocks)


def mask_or_none(embeds: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """The pipeline leaves a mask out that masks nothing; rows of other batches may be longer."""
    mask = embeds.new_ones(embeds.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    return {"embeds": embeds, "mask": mask}
