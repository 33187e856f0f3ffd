"""What every part of a recipe has in common: it is strict, immutable and explains its errors."""

from __future__ import annotations

import difflib
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class RecipeError(Exception):
    """A recipe that cannot be run: names the key, the value and the way out.

    Not a ``ValueError``: pydantic would fold it into a ``ValidationError`` and bury the message.
    """


class Strict(BaseModel):
    """Base of every recipe model: unknown keys are errors, instances never change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True, use_attribute_docstrings=True
    )


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """One line per problem of a ``ValidationError``: the key, what was given, and what would do."""
    lines = []
    problems = error.errors()
    places = [problem["loc"] for problem in problems]
    for problem in problems:
        if problem["type"] == "too_short" and any(place[: len(problem["loc"])] == problem["loc"] != place for place in places):
            continue  # a list that only seems short because an item of it is wrong
        place = ".".join(str(part) for part in problem["loc"]) or "recipe"
        given = problem.get("input")
        shown = "" if isinstance(given, (dict, BaseModel)) else f" = {given!r}"
        lines.append(f"{place}{shown}: {_reason(problem, model)}")
    return "\n".join(lines)


def _reason(problem: Any, model: type[BaseModel]) -> str:
    if problem["type"] != "extra_forbidden":
        return problem["msg"].removeprefix("Value error, ")
    known = _keys_beside(problem["loc"], model)
    nearest = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"unknown key; {hint}Known keys here: {', '.join(sorted(known))}"


def _keys_beside(place: tuple[Any, ...], model: type[BaseModel]) -> list[str]:
    """The keys that the model at the parent of ``place`` accepts.

    ``place`` mixes field names, list indices and the tags of discriminated unions, so we walk the
    JSON schema: a field descends into its schema, an index or a tag into whatever it selects.
    """
    schema = _schema(model)
    node = schema
    for part in place[:-1]:
        node = _descend(_resolve(node, schema), part, schema)
    options = [node, *_resolve(node, schema).get("anyOf", [])]
    return [key for option in options for key in _resolve(option, schema).get("properties", {})]


@cache
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def _resolve(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in node:
        node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
    return node


def _descend(node: dict[str, Any], part: Any, schema: dict[str, Any]) -> dict[str, Any]:
    tags = node.get("discriminator", {}).get("mapping", {})
    if part in tags:
        return {"$ref": tags[part]}
    if isinstance(part, int):
        return node.get("items", {})
    for option in [node, *node.get("anyOf", [])]:
        properties = _resolve(option, schema).get("properties", {})
        if part in properties:
            return properties[part]
    return {}
