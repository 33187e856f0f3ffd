"""Model families: one adapter each, behind one interface."""

from __future__ import annotations

from pathlib import Path

import torch

from ebbflow.models.base import Conditioning, Model, ModelError

__all__ = ["Conditioning", "Model", "ModelError", "load_model"]


def load_model(folder: Path, device: torch.device | None = None) -> Model:
    """Load a base-model folder with the adapter of its family (so far: glyph)."""
    from ebbflow.models.glyph import load_glyph

    return load_glyph(folder, device)
