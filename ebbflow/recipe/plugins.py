"""Names in a recipe that lead to code: what comes with Ebbflow by its name, a user's own by
``package.module:name``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, TypeVar

from pydantic import AfterValidator, BaseModel

from ebbflow.recipe.base import RecipeError, suggest_name

C = TypeVar("C", bound=BaseModel)
PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
# What ``extend_import_path`` has put on sys.path, which may move; PYTHONPATH keeps its order.
_added_folders: set[str] = set()


def validate_name_or_path(*known: str) -> AfterValidator:
    """Return a validator that accepts the known names, and ``package.module:name`` of something
    that the user wrote.
    """

    def check_name_or_path(value: str) -> str:
        if value not in known and not PATH.fullmatch(value):
            hint = suggest_name(value, known)
            choices = (
                f"{'Take' if hint else 'take'} {', '.join(known)}, or give" if known else "give"
            )
            raise ValueError(f"{hint}{choices} package.module:name of your own")
        return value

    return AfterValidator(check_name_or_path)


def describe_choices(choices: dict[str, str]) -> str:
    """Return choices with their meanings as the description of a key: ``"a: ...; b: ...."``."""
    return "; ".join(f"{name}: {text}" for name, text in choices.items()) + "."


def extend_import_path(*folders: str | Path) -> None:
    """Let code of one's own be imported from folders, in every command alike: the recipe's own and
    then the working directory.

    The folders are last on the path, in this order. One that an earlier call added moves to its
    place: the command line adds the working directory before a recipe, with its folder, is read.
    """
    for folder in folders:
        # Absolute, since a task may change the working directory; processes that a run starts get
        # the path of this one.
        text = os.path.abspath(folder)
        if text in _added_folders and text in sys.path:
            # The last one: PYTHONPATH may have the folder as well, at its own place.
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(text)]
        # At the end, so that a file of the user's, such as torch.py, hides no installed package.
        if text not in sys.path:
            sys.path.append(text)
            _added_folders.add(text)


def import_object(path: str) -> Any:
    """Import the object at ``package.module:name``.

    Raises:
        RecipeError: the module cannot be imported or has no such name. Whatever else goes wrong
            inside it comes through as it is.
    """
    module_path, name = path.split(":")
    try:
        module = import_module(module_path)
    except ImportError as error:
        raise RecipeError(
            f"{path} cannot be imported ({error}); install its package, put it beside the"
            " recipe or in the working directory, or put its folder on PYTHONPATH"
        ) from None
    try:
        return getattr(module, name)
    except AttributeError:
        hint = suggest_name(name, dir(module)).strip() or "name something that it defines"
        raise RecipeError(f"{path}: the module {module_path!r} has no {name!r}; {hint}") from None


def list_disallowed_paths(paths: Iterable[str], allowed: Collection[str | None]) -> list[str]:
    """Return the paths that ``allowed`` names neither whole nor by their module."""
    return [path for path in paths if path not in allowed and path.partition(":")[0] not in allowed]


def import_modules(package: str) -> list[ModuleType]:
    """Import every module in the folder of a package, in the order of their names."""
    folder = import_module(package).__path__
    return [import_module(f"{package}.{file.name}") for file in iter_modules(folder)]


def list_built_in_classes(package: str, base: type[C]) -> tuple[type[C], ...]:
    """Return the classes below ``base`` in the files of a package that a recipe can name: those
    whose ``name`` has a default.
    """
    classes = []
    for module in import_modules(package):
        for member in vars(module).values():
            if not (isinstance(member, type) and issubclass(member, base)):
                continue
            # A file may import the class of another file, such as its base class.
            if member.__module__ != module.__name__:
                continue
            name = member.model_fields.get("name")
            if name is not None and not name.is_required():
                classes.append(member)
    return tuple(classes)


def check_members(plugin: Any, members: tuple[str, ...], path: str, protocol: str) -> None:
    """Check that what a path leads to has the members of a protocol.

    Raises:
        RecipeError: it lacks one.
    """
    for member in members:
        if not hasattr(plugin, member):
            raise RecipeError(f"{path} is not an {protocol}: it lacks {member!r}")
