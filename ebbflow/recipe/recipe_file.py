"""Read a recipe from a file or a text."""

from __future__ import annotations

import os
from pathlib import Path

from ebbflow.recipe.base import Locate, RecipeError, find_nearest_name, locate_nowhere
from ebbflow.recipe.plugins import extend_import_path
from ebbflow.recipe.recipe import Recipe
from ebbflow.recipe.yaml_text import describe_yaml_error, read_yaml

MAX_BYTES = 2**16
"""Largest recipe file, in bytes; real ones have a few thousand."""
SHIPPED = "workflows/recipes"
"""The folder of the recipes that come with a clone of the repository."""
_locations: dict[str, Locate] = {}
"""Where the keys of a recipe are in the text that was read last for it, by digest."""


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe from a YAML (or JSON) file. Code that it names may lie beside it, or in the
    working directory.

    Raises:
        RecipeError: the file is missing, is not a mapping, or does not describe a run; names the
            line.
    """
    path = Path(path)
    # ``os.path.isfile`` returns False for a name that no file can have; Path.is_file may raise.
    if not os.path.isfile(path):
        raise RecipeError(
            f"no recipe at {path}; {_suggest_recipe(path)}`ebbflow init FOLDER` writes one, and"
            f" those that come with a clone of Ebbflow are in {SHIPPED}/"
        )
    # Before it is read: a file of weights, named by mistake, has gigabytes.
    if path.stat().st_size > MAX_BYTES:
        raise RecipeError(
            f"{path} is no recipe: it has more than {MAX_BYTES} bytes; name the YAML file of a run"
        )
    # Before it is read: validation imports algorithms, samplers and optimisers.
    extend_import_path(path.parent, Path.cwd())
    return parse_recipe(path.read_bytes(), str(path), path.parent)


def find_locations(recipe: Recipe) -> Locate:
    """Find where the keys of a recipe are in the text that this process read it from, for messages
    about it. A run gets the recipe through Flyte, as an equal object; in a pod there is no text.
    """
    return _locations.get(recipe.digest, locate_nowhere)


def parse_recipe(text: str | bytes, name: str, folder: Path = Path()) -> Recipe:
    """Read a recipe from YAML or JSON text.

    Args:
        name: what messages call the text, such as its file.
        folder: where relative paths of the recipe are looked up first.

    Raises:
        RecipeError: it is not a mapping, gives a key twice, or does not describe a run; names the
            line.
    """
    try:
        document = read_yaml(text, name)
    except Exception as error:
        # Not only YAMLError: PyYAML's converters raise ValueError and others at odd tags, and deep
        # nesting ends in a RecursionError.
        raise RecipeError(describe_yaml_error(error, name)) from None
    # An empty file gives None, a text without keys a string.
    if not isinstance(document.data, dict):
        raise RecipeError(
            f"{name} must hold a mapping of recipe keys, got {type(document.data).__name__}"
        )
    recipe = Recipe.model_validate(
        document.data, context={"locate": document.locate_key, "folder": folder}
    )
    _locations[recipe.digest] = document.locate_key
    return recipe


def _suggest_recipe(path: Path) -> str:
    """Return a hint for a path without a file: a recipe in the same folder, or a shipped one."""
    folders = [folder for folder in (path.parent, Path(SHIPPED)) if os.path.isdir(folder)]
    # Reversed, so that a recipe of the same folder replaces a shipped one of the same name.
    recipes = {
        file.stem: str(file)
        for folder in reversed(folders)
        for file in sorted(folder.glob("*.yaml"))
    }
    nearest = find_nearest_name(path.stem, recipes)
    return f"did you mean {recipes[nearest]}? " if nearest else ""
