"""The sound of samples, of families that generate some."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ebbflow.data.sounds import Sounds


def decode_sounds(model: Any, latents: Tensor) -> Sounds | None:
    """Decode the sound of latents, [N, ...]; None where the model's family generates none."""
    # No member of every family, as a user's own need not know that others have sound.
    if not hasattr(model, "decode_sound"):
        return None
    return Sounds(model.decode_sound(latents), model.sound_rate)
