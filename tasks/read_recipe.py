"""Read the recipe that a person named in Flyte's console."""

from __future__ import annotations

import fsspec
from flytekit import task

from ebbflow.launch import pin_rewards
from ebbflow.recipe import Recipe, RecipeError, load_recipe
from ebbflow.recipe.recipe_file import parse_recipe
from tasks.resources import light_resources
from tasks.sources import PACKAGES

SHIPPED = PACKAGES["workflows"] / "recipes"
INPUT = "recipe"
"""What errors call the text."""


@task(**light_resources())
def read_recipe(recipe: str, approval_hours: float) -> Recipe:
    """Read a recipe by the name of one that comes with Ebbflow, by a URI, or from its text.

    Raises:
        RecipeError: there is no such recipe, or it does not describe a run.
    """
    resolved = pin_rewards(_find_recipe(recipe.strip()))
    if not approval_hours or resolved.promotion.approval:
        return resolved
    promotion = resolved.promotion.model_copy(update={"approval": approval_hours})
    return resolved.model_copy(update={"promotion": promotion})


def _find_recipe(text: str) -> Recipe:
    shipped = SHIPPED / f"{text}.yaml"
    # A text of several lines is no name, and may be longer than one.
    if text.isidentifier() and shipped.is_file():
        return load_recipe(shipped)
    if "{" in text or "\n" in text or ": " in text:
        return parse_recipe(text, INPUT)
    if "://" in text:
        try:
            with fsspec.open(text, "rb") as file:
                content = file.read()
        except Exception as error:
            raise RecipeError(f"{INPUT} = {text!r} cannot be read: {error}") from error
        return parse_recipe(content, text)
    names = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.yaml")))
    raise RecipeError(
        f"{INPUT} = {text!r}: give the URI of a YAML file that pods can read, the text of a recipe,"
        f" or one of {names}"
    )
