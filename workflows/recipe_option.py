"""The recipe that ``pyflyte run --recipe`` is given, read as ``ebbflow check`` reads it: a key
given twice is an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import click
from flytekit.interaction.click_types import JsonParamType
from flytekit.models.interface import Variable

from ebbflow.recipe import Recipe, load_recipe
from ebbflow.recipe.recipe import SHIPPED, parse_recipe

EXAMPLE = f"{SHIPPED}/glyph.yaml"
HELP = (
    f"A YAML file such as {EXAMPLE}, or its text. `ebbflow keys` explains every key, `ebbflow check"
    " FILE` checks one."
)
COMMAND = "flytekit.clis.sdk_in_container.run"
"""The module of ``pyflyte run``."""

_flytekits_own = JsonParamType._parse


def _parse_option(option: JsonParamType, value: Any, param: Any) -> Any:
    """Parse a recipe, a file or a text, to plain data; every other option as flytekit does."""
    # Not a string: a default, or a value that was parsed already.
    if option._python_type is not Recipe or not isinstance(value, str):
        return _flytekits_own(option, value, param)
    # In braces it is the text of a recipe, unless a file has such a name.
    is_text = "{" in value and not os.path.isfile(value)
    recipe = parse_recipe(value, "--recipe") if is_text else load_recipe(value)
    return recipe.model_dump(mode="json")


def read_recipes_strictly() -> None:
    """Let ``pyflyte run`` read recipes in this way: flytekit makes the option itself, and nothing
    can name another.
    """
    JsonParamType._parse = _parse_option
    # Not loaded in pods, which have no options.
    command = sys.modules.get(COMMAND)
    if command:
        _shorten_help(command)


def _shorten_help(command: Any) -> None:
    """Give a recipe's option a sentence that names an example as its help."""
    make = command.to_click_option

    def to_click_option(
        ctx: Any,
        flyte_ctx: Any,
        input_name: str,
        literal_var: Variable,
        python_type: Any,
        *rest: Any,
    ) -> Any:
        if python_type is not Recipe:
            return make(ctx, flyte_ctx, input_name, literal_var, python_type, *rest)
        described = Variable(literal_var.type, HELP)
        option = make(ctx, flyte_ctx, input_name, described, python_type, *rest)
        option.callback = partial(_require_value, option.callback)
        return option

    command.to_click_option = to_click_option


def _require_value(
    convert: Callable[..., Any], ctx: click.Context, param: click.Parameter, value: Any
) -> Any:
    """Convert a value, and ask for one where there is none."""
    # Flytekit passes ``default=None``, which click takes for a value.
    if value is None:
        raise click.MissingParameter(f"Name a recipe, such as --recipe {EXAMPLE}", ctx, param)
    return convert(ctx, param, value)
