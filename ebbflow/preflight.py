"""What can be checked about a recipe before anything is paid for."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ebbflow.recipe import Recipe, RecipeError
from ebbflow.rewards.combine import load_scorer


def check_recipe(recipe: Recipe) -> None:
    """Check the places that a recipe names and the rewards that it trains on.

    Raises:
        RecipeError: an output folder that cannot be written, a prompt file or base model that is not there.
        ModelError: a base-model folder that is not one.
        RewardError: a reward that cannot run here.
    """
    if "://" not in recipe.output:
        _check_writable(Path(recipe.output))
    if recipe.prompts.source and "://" not in recipe.prompts.source and not Path(recipe.prompts.source).is_file():
        raise RecipeError(f"prompts.source = {recipe.prompts.source!r}: there is no such file; leave it out to make prompts up")
    if recipe.model.path and "://" not in recipe.model.path:
        from ebbflow.models.glyph import check_glyph_folder  # brings torch along

        check_glyph_folder(Path(recipe.model.path))
    load_scorer(recipe.rewards.terms, recipe.rewards.guards)


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RecipeError(f"output = {str(folder)!r} cannot be written ({error.strerror}); name another folder") from None
