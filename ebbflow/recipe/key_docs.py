"""The documentation of a section's keys: the docstrings below its fields, and their groups."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel


def read_field_docs(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field of a model, including inherited fields.

    Read from the source when somebody asks: pydantic's ``use_attribute_docstrings`` reads it as the
    class is made, and its search for the source loads every module that flytekit meant to load
    lazily, Ray and pandas among them.
    """
    docs: dict[str, str] = {}
    # From the last base class to the model itself, so that a redefined field has its own docstring.
    for owner in reversed(model.__mro__):
        if issubclass(owner, BaseModel) and owner is not BaseModel:
            docs |= _read_docs_by_class(owner.__module__).get(owner.__name__, {})
    return docs


def group_keys(model: type[BaseModel]) -> dict[str, list[str]]:
    """Return the keys of a model by the heading of their group, in the order of the groups.

    A group is a base class with a ``heading``. Keys of no group come first, below an empty heading.

    Example:
        >>> group_keys(OnlineStageConfig)
        {"": ["kind"], "algorithm, loss and optimiser": ["algorithm", "advantages", ...], ...}
    """
    groups: dict[str, list[str]] = {"": []}
    heading_of_key: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        heading = vars(owner).get("heading", "")
        # A class without a heading may change the default of a key, which stays in its group.
        if heading:
            heading_of_key |= dict.fromkeys(owner.__annotations__, heading)
    for key in model.model_fields:
        groups.setdefault(heading_of_key.get(key, ""), []).append(key)
    return groups


@cache
def _read_docs_by_class(module: str) -> dict[str, dict[str, str]]:
    """Return class name to field to docstring of a module; nothing if it has no source file."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    if not file.endswith(".py"):
        return {}
    classes = [
        node
        for node in ast.walk(ast.parse(Path(file).read_bytes()))
        if isinstance(node, ast.ClassDef)
    ]
    return {node.name: dict(_iterate_field_docs(node)) for node in classes}


def _iterate_field_docs(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in pairwise(node.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(doc))
            ):
                yield name, " ".join(doc.split())
