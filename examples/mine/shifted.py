"""A glyph model that spends more of its denoising steps where there is most noise, as SD3 does."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ebbflow.models.glyph import GlyphModel, load_glyph
from ebbflow.recipe.model import Model as ModelConfig

SHIFT = 3.0


class ShiftedGlyph(GlyphModel):
    """The glyph model with shift s in its schedule: sigma -> s sigma / (1 + (s - 1) sigma) (SD3, 2403.03206)."""

    def sigmas(self, steps: int) -> Tensor:
        sigmas = super().sigmas(steps)
        return SHIFT * sigmas / (1 + (SHIFT - 1) * sigmas)


def load(folder: Path, config: ModelConfig, device: torch.device) -> ShiftedGlyph:
    """Load the base-model folder of a glyph model."""
    glyph = load_glyph(folder, config, device)
    _, height, width = glyph.latent_shape
    return ShiftedGlyph(glyph.transformer, glyph.text_encoder, glyph.tokenizer, glyph.scheduler, height, width)
