"""Check what the base model of a recipe can do, before a run costs anything: the size that it
draws, and what algorithms and stages ask of the class of a user's family.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ebbflow.data.buckets import list_bucket_sizes
from ebbflow.estimate.measured import check_once
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.base_folder import ModelError, check_folder
from ebbflow.recipe.families import FAMILIES
from ebbflow.recipe.model import ModelConfig, find_picture_size, resize_model
from ebbflow.recipe.paths import LOCAL_PATH


def check_model(model: ModelConfig, on_cluster: bool) -> None:
    """Check that there is a base model of the family, and that it generates the size that its
    section sets.

    Raises:
        RecipeError: nothing can be imported from the path of a family, or the folder is a local one
            and ``on_cluster``.
        ModelError: the folder is no base model of the family, or it cannot generate the size.
    """
    if model.family not in FAMILIES:
        from ebbflow.models.families import load_adapter  # imports torch

        load_adapter(model.family)
    elif model.path and "://" not in model.path and not model.is_on_hub:
        if on_cluster:
            raise RecipeError(f"model.path = {model.path!r} {LOCAL_PATH}")
        check_folder(Path(model.path), model.family)
    # A family of a fixed size, such as glyph, never comes here: its recipe cannot set one.
    if model.family in FAMILIES and (model.height or model.width or model.frames > 1):
        _check_size("model", model)


def _check_size(key: str, model: ModelConfig) -> None:
    """Check that the model can generate the size that a section of the recipe sets."""
    sides = [side for side in (model.height, model.width) if side]
    # Torch and the family's classes take seconds to import: only where its record does not tell.
    if not FAMILIES[model.family].surely_generates(sides, model.frames):
        check_once(model, "size", partial(_check_size_of_parts, key, model))


def _check_size_of_parts(key: str, model: ModelConfig) -> None:
    """Check the same by the configurations of the model's parts."""
    from ebbflow.models.sizes import check_size  # imports torch

    try:
        check_size(model)
    except ModelError as error:
        # It names keys of the section model, and the size may be another section's.
        raise ModelError(str(error).replace("model.", f"{key}.", 1)) from None


def check_decodes_with_gradient(family: str, algorithm: str) -> None:
    """Check that a family decodes latents with gradient, for an algorithm that needs it.

    Raises:
        ModelError: a user's family does not.
    """
    adapter = _load_adapter_to_inspect(family)
    if adapter:
        from ebbflow.models.base import require_pixels  # imports torch

        require_pixels(adapter, algorithm)


def check_split_guidance(recipe: Recipe) -> None:
    """Check that the family predicts under guidance as stages with ``negative_gradient: false``
    train.

    Raises:
        ModelError: a user's family does not say that it does.
    """
    if all(stage.negative_gradient for stage in recipe.stages):
        return
    adapter = _load_adapter_to_inspect(recipe.model.family)
    if adapter:
        from ebbflow.models.base import require_split_guidance  # imports torch

        require_split_guidance(adapter)


def _load_adapter_to_inspect(family: str) -> Any:
    """Load the class of a user's family; None for Ebbflow's own, which have all that is asked for,
    and for one that forwards attributes to an object that it wraps, as only its instance can then
    say which methods it has.
    """
    if family in FAMILIES:
        return None
    from ebbflow.models.families import load_adapter  # imports torch

    adapter: Any = load_adapter(family)
    return None if hasattr(adapter, "__getattr__") else adapter


def check_further_sizes(recipe: Recipe) -> None:
    """Check the sizes of evaluations and of the rollouts of stages, where they have their own.

    Raises:
        ModelError: the model cannot generate one of them.
    """
    model = recipe.model
    resized = {}
    if recipe.evaluation.height or recipe.evaluation.width:
        resized["evaluation"] = recipe.evaluation.evaluated_model(model)
    for index, stage in enumerate(recipe.stages):
        for number, size in enumerate(stage.sizes):
            resized[f"stages.{index}.sizes.{number}"] = resize_model(model, size.height, size.width)
        buckets = stage.captioned_data.buckets if stage.captioned_data else None
        picture_size = find_picture_size(model)
        if buckets and picture_size:
            for height, width in list_bucket_sizes(picture_size, buckets):
                resized[f"stages.{index}.data.buckets"] = resize_model(model, height, width)
    if not resized:
        return
    if model.family not in FAMILIES:
        from ebbflow.models.base import require_resize  # imports torch

        adapter = _load_adapter_to_inspect(model.family)
        if adapter:
            require_resize(adapter)
        return
    for key, resized_model in resized.items():
        _check_size(key, resized_model)
