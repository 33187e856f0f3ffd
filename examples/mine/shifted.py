"""A glyph model that spends more of its denoising steps where there is most noise, as SD3 does."""

from __future__ import annotations

from torch import Tensor

from ebbflow.models.families.glyph import GlyphModel

SHIFT = 3.0


class ShiftedGlyph(GlyphModel):
    """The glyph model with shift s in its schedule: sigma -> s sigma / (1 + (s - 1) sigma) (SD3,
    2403.03206).
    """

    def compute_sigmas(self, steps: int) -> Tensor:
        sigmas = super().compute_sigmas(steps)
        return SHIFT * sigmas / (1 + (SHIFT - 1) * sigmas)
