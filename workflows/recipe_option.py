"""The recipe that ``pyflyte run --recipe`` is given, read as ``ebbflow check`` reads it: a key given twice is an error."""

from __future__ import annotations

import os
from typing import Any

from flytekit.interaction.click_types import JsonParamType

from ebbflow.recipe import Recipe, load_recipe
from ebbflow.recipe.recipe import parse_recipe

_flytekits_own = JsonParamType._parse


def _parse(option: JsonParamType, value: Any, param: Any) -> Any:
    """A recipe, a file or a text, as plain data; every other option as flytekit reads it."""
    if option._python_type is not Recipe or not isinstance(value, str):
        return _flytekits_own(option, value, param)
    is_text = "{" in value and not os.path.isfile(value)
    recipe = parse_recipe(value, "--recipe") if is_text else load_recipe(value)
    return recipe.model_dump(mode="json")


def read_recipes_strictly() -> None:
    """Let ``pyflyte run`` read recipes in this way: flytekit makes the option itself, and nothing can name another."""
    JsonParamType._parse = _parse
