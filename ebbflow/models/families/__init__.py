"""The adapters, a file per family: each makes a diffusers pipeline, or a model of our own, an
``ebbflow.models.base.Model``.
"""

from __future__ import annotations

from ebbflow.models.base import Model, ModelError
from ebbflow.recipe.families import FAMILIES
from ebbflow.recipe.plugins import import_object


def load_adapter(family: str) -> type[Model]:
    """The adapter of a family that Ebbflow ships, or a user's own at ``package.module:Class``;
    imported here, with torch.

    Raises:
        RecipeError: nothing can be imported from the path.
        ModelError: what it leads to is no adapter.
    """
    path = f"{__name__}.{family}:{FAMILIES[family].adapter}" if family in FAMILIES else family
    adapter: type[Model] = import_object(path)
    if not hasattr(adapter, "load"):
        raise ModelError(
            f"model.family = {path!r} has no 'load'; name a class with the members of"
            " ebbflow.models.base.Model"
        )
    return adapter
