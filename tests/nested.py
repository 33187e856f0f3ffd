"""Every place in a nested value, and the value with something else there."""

from __future__ import annotations

from typing import Any


def places(value: object, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys and indices that lead to each; the first leads to the whole."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(deeper for key, inner in inside for deeper in places(inner, (*place, key)))]


def replaced(value: Any, place: tuple[Any, ...], new: object) -> Any:
    if not place:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = replaced(value[place[0]], place[1:], new)
    return copy
