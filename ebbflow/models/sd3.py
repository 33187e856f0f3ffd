"""The Stable Diffusion 3 family (2403.03206): SD3-medium, SD3.5-medium and SD3.5-large."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor, nn

from ebbflow.data.prompts import Prompt
from ebbflow.models.base import Conditioning
from ebbflow.models.layout import read_index
from ebbflow.models.pipeline import JOINT_ATTENTION, PipelineModel, dynamic_shift, load_pipeline
from ebbflow.recipe.model import Model as ModelConfig


class SD3Model(PipelineModel):
    """Adapter of ``StableDiffusion3Pipeline``; the T5 encoder may be null in the folder's ``model_index.json``."""

    pipeline_class = StableDiffusion3Pipeline
    # Of Flow-GRPO: the attention of the image and of the text stream.
    lora_targets = JOINT_ATTENTION
    text_parts = ("text_encoder", "text_encoder_2", "text_encoder_3")
    default_size = (1024, 1024)

    @staticmethod
    def own_parts(folder: Path) -> dict[str, Any]:
        index = read_index(folder)
        return {part: None for part in ("text_encoder_3", "tokenizer_3") if index.get(part, [None])[0] is None}

    def _latent_shape(self) -> tuple[int, ...]:
        patch, scale = self.transformer.config.patch_size, self.pipeline.vae_scale_factor
        self._require_multiple(patch * scale)
        return (self.transformer.config.in_channels, self.height // scale, self.width // scale)

    def sigmas(self, steps: int) -> Tensor:
        patch = self.transformer.config.patch_size
        tokens = self.latent_shape[1] // patch * (self.latent_shape[2] // patch)
        scheduler = self.pipeline.scheduler
        scheduler.set_timesteps(steps, **dynamic_shift(scheduler, tokens, most=1.16))
        return scheduler.sigmas.clone()

    def _encode(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=texts,
            prompt_2=None,
            prompt_3=None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.config.max_tokens or 256,
        )
        return {"embeds": embeds, "pooled": pooled}

    def _predict(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return self.transformer(
            hidden_states=latents,
            timestep=1000 * sigma,
            encoder_hidden_states=conditioning["embeds"],
            pooled_projections=conditioning["pooled"],
            return_dict=False,
        )[0]

    def blocks(self) -> list[nn.Module]:
        return list(self.transformer.transformer_blocks)


def load(folder: Path, config: ModelConfig, device: torch.device) -> SD3Model:
    """Load a folder of the family.

    Raises:
        ModelError: as ``load_pipeline``, or the size cannot be drawn.
    """
    return SD3Model(load_pipeline(SD3Model, folder, config, device), config, device)
