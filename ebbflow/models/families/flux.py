"""The FLUX.1 family: dev, which takes the guidance as an input, and schnell, which takes none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import FluxPipeline
from torch import Tensor, nn

from ebbflow.data.prompts import Prompt
from ebbflow.models.base import Conditioning, ModelError
from ebbflow.models.pipeline import JOINT_ATTENTION, PackedPipelineModel, pack
from ebbflow.recipe.families import FAMILIES
from ebbflow.recipe.model import ModelConfig


class FluxModel(PackedPipelineModel):
    """Adapter of ``FluxPipeline``."""

    pipeline_class = FluxPipeline
    lora_targets = [  # as Flow-GRPO: attention of all blocks, feed-forward of those with two streams
        *JOINT_ATTENTION,
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    ]
    text_parts = ("text_encoder", "text_encoder_2")
    default_size = (1024, 1024)
    guided = FAMILIES["flux"].guided

    @classmethod
    def _check(cls, pipeline: Any, config: ModelConfig) -> None:
        if config.guidance != 1 and not pipeline.transformer.config.guidance_embeds:
            raise ModelError(
                f"model.guidance = {config.guidance}: {config.path} takes no guidance, like FLUX.1 schnell; leave it out"
            )

    def _encode(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        limit = self.max_tokens
        embeds, pooled, _ = self.pipeline.encode_prompt(texts, None, device=self.device, max_sequence_length=limit)
        return {"embeds": embeds, "pooled": pooled}

    def _predict(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        guidance = torch.full_like(sigma, conditioning.guidance) if self.transformer.config.guidance_embeds else None
        _, height, width = self.latent_shape
        velocity: Tensor = self.transformer(
            hidden_states=pack(latents),
            timestep=sigma,
            guidance=guidance,
            pooled_projections=conditioning["pooled"],
            encoder_hidden_states=conditioning["embeds"],
            txt_ids=latents.new_zeros(conditioning["embeds"].shape[1], 3),
            img_ids=_positions(height // 2, width // 2).to(latents),
            return_dict=False,
        )[0]
        return velocity

    def blocks(self) -> list[nn.Module]:
        return [*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks]


def _positions(height: int, width: int) -> Tensor:
    """(0, row, column) of every token, [height * width, 3]."""
    row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], -1).reshape(-1, 3)
