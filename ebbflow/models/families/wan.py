"""The Wan family: 2.1 text-to-video, and 2.2's 5-billion model with one transformer; videos, or
images as videos of one frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from diffusers import WanPipeline
from torch import Tensor, nn

from ebbflow.data.prompts import Prompt
from ebbflow.models.base import Conditioning, ModelError, Tokens
from ebbflow.models.pipeline import channel_statistics
from ebbflow.models.published import XXL, Part, Published
from ebbflow.models.videos import DrawsVideos
from ebbflow.recipe.families import Family
from ebbflow.recipe.model import ModelConfig

FAMILY = Family(
    adapter="WanModel",
    pipeline="WanPipeline",
    size_multiple=32,
    frame_multiple=4,
    vllm_omni="ebbflow_vllm_omni.networks:WAN",
    feature_caches=("first_block", "taylor_seer", "mag"),
)
PUBLISHED: Published = {
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": {
        "transformer": Part(
            "diffusers",
            "WanTransformer3DModel",
            {
                "num_layers": 30,
                "num_attention_heads": 24,
                "in_channels": 48,
                "out_channels": 48,
                "ffn_dim": 14336,
            },
            bytes=4,
        ),
        "text_encoder": Part("transformers", "UMT5EncoderModel", XXL | {"vocab_size": 256384}),
        "vae": Part(
            "diffusers",
            "AutoencoderKLWan",
            {
                "base_dim": 160,
                "decoder_base_dim": 256,
                "z_dim": 48,
                "is_residual": True,
                "in_channels": 12,
                "out_channels": 12,
                "patch_size": 2,
                "scale_factor_spatial": 16,
            },
            bytes=4,
        ),
    },
}


class WanModel(DrawsVideos):
    """Adapter of ``WanPipeline``."""

    pipeline_class = WanPipeline
    published: ClassVar[Published] = PUBLISHED
    # Both self-attention and cross-attention have layers of these names.
    lora_targets = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
    text_parts: ClassVar[tuple[str, ...]] = ("text_encoder",)
    default_size = (480, 832)
    shares_tokens = True

    @classmethod
    def _check_pipeline(cls, pipeline: Any, config: ModelConfig) -> None:
        if getattr(pipeline, "transformer_2", None) is not None:
            raise ModelError(
                f"{config.path} holds two transformers, as Wan2.2-A14B; set model.family to"
                " wan_a14b, which trains one of them"
            )

    def _compute_latent_shape(self) -> tuple[int, ...]:
        scale = self.pipeline.vae_scale_factor_spatial
        pace = self.pipeline.vae_scale_factor_temporal
        # The patch is (frames, rows, columns), published as (1, 2, 2).
        self._require_multiple(scale * self.transformer.config.patch_size[1])
        return (
            self.transformer.config.in_channels,
            self._count_latent_frames(pace),
            self.height // scale,
            self.width // scale,
        )

    def compute_sigmas(self, steps: int) -> Tensor:
        """The schedule of the folder's scheduler. The published one, UniPC, takes second-order
        steps on it, at times cut to integers; we take Euler's, at the times as they are.
        """
        self.pipeline.scheduler.set_timesteps(steps)
        sigmas = self.pipeline.scheduler.sigmas.clone().float()
        # UniPC begins 1e-6 below 1 for the sake of its logarithms; there the noise of Flow-SDE is a
        # thousand times too large.
        return torch.where(sigmas > 1 - 1e-5, 1.0, sigmas)

    def count_tokens(self) -> Tokens:
        # Text is attended to, and does not go through the blocks.
        return replace(super().count_tokens(), joint=False)

    def _encode_inputs(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        return self._encode_texts(texts)

    def _encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        # [n, L, 4096] of UMT5, all padded to max_tokens with zeros: the network takes no mask.
        embeds, _ = self.pipeline.encode_prompt(
            texts,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_tokens,
            device=self.device,
        )
        return {"embeds": embeds}

    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return self._call_expert(self.transformer, latents, sigma, conditioning)

    def _call_expert(
        self, network: Any, latents: Tensor, sigma: Tensor, conditioning: Conditioning
    ) -> Tensor:
        # Wan2.2's pipeline gives every token a time of its own; without an image to animate all are
        # the same, and one will do.
        velocity: Tensor = network(
            hidden_states=latents,
            timestep=1000 * sigma,
            encoder_hidden_states=conditioning["embeds"],
            return_dict=False,
        )[0]
        return velocity

    def _unscale_latents(self, latents: Tensor) -> Tensor:
        mean, std = channel_statistics(self.pipeline.vae, latents)
        return latents * std + mean

    def _scale_latents(self, latents: Tensor) -> Tensor:
        mean, std = channel_statistics(self.pipeline.vae, latents)
        return (latents - mean) / std

    def list_blocks(self) -> list[nn.Module]:
        return list(self.transformer.blocks)
