"""The LTX-Video family (2501.00103), text to video: the first release, whose VAE decodes without
noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from diffusers import LTXPipeline
from torch import Tensor, nn

from ebbflow.data.prompts import Prompt
from ebbflow.flow.latents import get_picture_shape
from ebbflow.models.base import Conditioning, ModelError, Tokens
from ebbflow.models.pipeline import dynamic_shift_arguments
from ebbflow.models.published import T5_XXL, Part, Published
from ebbflow.models.videos import DrawsVideos
from ebbflow.recipe.families import Family
from ebbflow.recipe.model import ModelConfig

FAMILY = Family(
    adapter="LTXVideoModel",
    pipeline="LTXPipeline",
    size_multiple=32,
    frame_multiple=8,
    feature_caches=("first_block", "taylor_seer", "mag"),
)
PUBLISHED: Published = {
    "Lightricks/LTX-Video": {
        "transformer": Part("diffusers", "LTXVideoTransformer3DModel", {}),
        "text_encoder": T5_XXL,
        "vae": Part("diffusers", "AutoencoderKLLTXVideo", {}),
    },
}
FRAME_RATE = 25
"""Frames per second of the pipeline, in which the network counts time."""


class LTXVideoModel(DrawsVideos):
    """Adapter of ``LTXPipeline``; a latent is 32 x 32 pixels of eight frames, and a token."""

    pipeline_class = LTXPipeline
    published = PUBLISHED
    lora_targets = [
        *(
            f"{attention}.{layer}"
            for attention in ("attn1", "attn2")
            for layer in ("to_q", "to_k", "to_v", "to_out.0")
        ),
        "ff.net.0.proj",
        "ff.net.2",
    ]
    text_parts: ClassVar[tuple[str, ...]] = ("text_encoder",)
    default_size = (512, 704)
    default_max_tokens = 128
    shares_tokens = True

    @classmethod
    def _check_pipeline(cls, pipeline: Any, config: ModelConfig) -> None:
        if pipeline.vae.config.timestep_conditioning:
            raise ModelError(
                f"{config.path} has a VAE that draws noise to decode, as LTX-Video from .9.1 on;"
                " take the first release"
            )

    def _compute_latent_shape(self) -> tuple[int, ...]:
        scale = self.pipeline.vae_spatial_compression_ratio
        pace = self.pipeline.vae_temporal_compression_ratio
        self._require_multiple(scale)
        # A token is one latent, so that sides are multiples of 32 pixels and no more.
        return (
            self.transformer.config.in_channels,
            self._count_latent_frames(pace),
            self.height // scale,
            self.width // scale,
        )

    @property
    def frames_per_decode(self) -> int:
        # It decodes a video whole.
        return self.config.frames

    def count_tokens(self) -> Tokens:
        return replace(super().count_tokens(), image=self._count_video_tokens(), joint=False)

    def _count_video_tokens(self) -> int:
        return math.prod(get_picture_shape(self.latent_shape)[1:])

    def token_widths(self) -> tuple[int, int]:
        config = self.transformer.config
        return config.num_attention_heads * config.attention_head_dim, config.caption_channels

    def _schedule_arguments(self, tokens: int, steps: int) -> dict[str, float]:
        # Of all latents; ``tokens`` counts patches of 2 x 2 of the first dimensions, as for images.
        return dynamic_shift_arguments(self.pipeline.scheduler, self._count_video_tokens())

    def _encode_inputs(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        embeds, mask = self.pipeline._get_t5_prompt_embeds(
            texts, max_sequence_length=self.max_tokens, device=self.device
        )
        return {"embeds": embeds, "mask": mask}

    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        pipeline = self.pipeline
        _, frames, height, width = self.latent_shape
        scale = pipeline.vae_spatial_compression_ratio
        velocity: Tensor = self.transformer(
            # [N, C, F, H, W] as tokens [N, F H W, C].
            hidden_states=latents.flatten(2).mT,
            encoder_hidden_states=conditioning["embeds"],
            timestep=1000 * sigma,
            encoder_attention_mask=conditioning["mask"],
            num_frames=frames,
            height=height,
            width=width,
            # Rotary positions in seconds and in pixels, not in latents.
            rope_interpolation_scale=(
                pipeline.vae_temporal_compression_ratio / FRAME_RATE,
                scale,
                scale,
            ),
            return_dict=False,
        )[0]
        return velocity.mT.reshape(latents.shape)

    def _unscale_latents(self, latents: Tensor) -> Tensor:
        mean, std = self._channel_statistics(latents)
        return latents * std + mean

    def _scale_latents(self, latents: Tensor) -> Tensor:
        mean, std = self._channel_statistics(latents)
        return (latents - mean) / std

    def _channel_statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel, which the VAE keeps with its weights."""
        # Buffers [C], not keys of the configuration as those of other video VAEs.
        vae = self.pipeline.vae
        mean, std = (
            values.view(-1, 1, 1, 1).to(like) for values in (vae.latents_mean, vae.latents_std)
        )
        return mean, std / vae.config.scaling_factor

    def list_blocks(self) -> list[nn.Module]:
        return list(self.transformer.transformer_blocks)
