"""Model families: one adapter each, behind one interface."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # before it is imported: it warns of parts that nothing here uses

import torch

from ebbflow.models.base import Conditioning, Model, ModelError, default_device, predict
from ebbflow.recipe.algorithms import import_path
from ebbflow.recipe.model import Model as ModelConfig

FAMILIES = {
    "glyph": "ebbflow.models.glyph:load_glyph",
    "sd3": "ebbflow.models.sd3:load",
    "qwen_image": "ebbflow.models.qwen_image:load",
    "qwen_image_edit": "ebbflow.models.qwen_image:load_edit",
    "flux": "ebbflow.models.flux:load",
    "wan": "ebbflow.models.wan:load",
}
"""What loads each family, ``(folder, config, device) -> Model``; imported when a recipe names it."""

__all__ = ["Conditioning", "Model", "ModelError", "load_model", "predict"]


def load_model(folder: Path, config: ModelConfig = ModelConfig(), device: torch.device | None = None) -> Model:
    """Load a base-model folder with the adapter of its family, to draw as ``config`` says, frozen and in evaluation mode.

    Raises:
        RecipeError: nothing can be imported from a path.
        ModelError: the folder is no base model of the family.
    """
    load = import_path(FAMILIES.get(config.family, config.family))
    return load(folder, config, device or default_device())
