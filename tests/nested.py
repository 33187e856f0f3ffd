"""Every place in a nested value, and the value with something else there."""

from __future__ import annotations

from typing import Any


def paths(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys and indices that lead to each; the first leads to the whole."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(deeper for key, inner in inside for deeper in paths(inner, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: object) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy
