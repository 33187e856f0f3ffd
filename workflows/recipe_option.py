"""The recipe that ``pyflyte run --recipe`` is given, read as ``ebbflow check`` reads it: a key
given twice is an error. With ``--remote``, an upload that would lack code that the recipe needs is
one, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import click
from flytekit.constants import CopyFileDetection
from flytekit.interaction.click_types import JsonParamType
from flytekit.models.interface import Variable

from ebbflow.recipe import Recipe, load_recipe
from ebbflow.recipe.recipe_file import SHIPPED, parse_recipe
from ebbflow.storage.identity import IMPORT_PATH, find_package_roots
from tasks.cache import CLONE
from tasks.sources import is_uploaded, list_ignored_sources

EXAMPLE = f"{SHIPPED}/glyph.yaml"
HELP = (
    f"A YAML file such as {EXAMPLE}, or its text. `ebbflow keys` explains every key, `ebbflow check"
    " FILE` checks one."
)
COMMAND = "flytekit.clis.sdk_in_container.run"
"""The module of ``pyflyte run``."""
MAX_SHOWN_FILES = 3

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
    if ctx.obj.is_remote:
        _check_upload(ctx, value)
    return convert(ctx, param, value)


def _check_upload(ctx: click.Context, recipe: Recipe) -> None:
    """Refuse a submission whose pods would not have the sources of this clone.

    Raises:
        click.UsageError: only some of Ebbflow's modules would be uploaded, not the user's own, or
            not all files of a package.
    """
    if ctx.obj.copy != CopyFileDetection.ALL and not ctx.obj.copy_all:
        raise click.UsageError(
            "--remote uploads only the modules that this command happens to import; add --copy all,"
            " which uploads every file that neither git nor .dockerignore ignores",
            ctx,
        )
    ignored = list_ignored_sources()
    if ignored:
        raise click.UsageError(
            f"{', '.join(ignored[:MAX_SHOWN_FILES])}: {len(ignored)} sources that this clone runs"
            " with are not uploaded, as git, .dockerignore or .flyteignore ignores them, and every"
            " pod would refuse to run without them: let the file that ignores them pass them"
            " (`git check-ignore -v FILE` names git's), or move them out of the package",
            ctx,
        )
    for name in sorted(_list_packages(recipe.model_dump(mode="json"))):
        for root in find_package_roots(name):
            path = root.resolve()
            if path.is_relative_to(sys.prefix):
                continue  # an installed package, which is the image's
            if not path.is_relative_to(CLONE):
                raise click.UsageError(
                    f"the recipe names {name}, which is in {path} and not uploaded: move it beside"
                    f" the package ebbflow, into {CLONE}, or install it in the image and here",
                    ctx,
                )
            if path.parent != CLONE or not is_uploaded(path.name):
                raise click.UsageError(
                    f"the recipe names {name}, which is in {path} and would not be found in a pod:"
                    f" it belongs beside the package ebbflow, and .dockerignore needs the line"
                    f" !{path.name}",
                    ctx,
                )


def _list_packages(value: Any) -> set[str]:
    """List the packages of all ``package.module:name`` in a recipe, without Ebbflow's."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return {name for item in value for name in _list_packages(item)}
    if isinstance(value, str) and IMPORT_PATH.fullmatch(value):
        return {value.partition(":")[0].partition(".")[0]} - {"ebbflow"}
    return set()
