"""Model families: one adapter each, behind one interface."""

from __future__ import annotations

from pathlib import Path

import torch

from ebbflow.models.base import Conditioning, Model, ModelError
from ebbflow.recipe.algorithms import import_path

FAMILIES = {"glyph": "ebbflow.models.glyph:load_glyph"}

__all__ = ["Conditioning", "Model", "ModelError", "load_model"]


def load_model(folder: Path, family: str = "glyph", device: torch.device | None = None) -> Model:
    """Load a base-model folder with the adapter of its family: one of ``FAMILIES``, or ``package.module:load`` of a user's own.

    Raises:
        RecipeError: nothing can be imported from a path.
        ModelError: the folder is no base model of the family.
    """
    return import_path(FAMILIES.get(family, family))(folder, device)
