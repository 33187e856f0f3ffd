"""The digest of a recipe: sha256 of the keys that are set.

A key is set when its value is not the default of its field, whoever chose the value: the user, or
the defaults of an algorithm. So recipes that mean the same have one digest, however much of them is
written out, and a new key with a default changes no digest.
"""

from __future__ import annotations

import hashlib
import json
import typing
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python


def compute_digest(config: BaseModel) -> str:
    """Return the sha256 of the keys that are set, as JSON with sorted keys.

    A default that changes later changes what a recipe means, but not its digest. What was made
    from a recipe therefore keeps the resolved one, which is complete.
    """
    # Sorted: the order of ``branches`` and of a plugin's ``options`` in the file must not count.
    text = json.dumps(select_set_keys(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def select_set_keys(config: BaseModel) -> dict[str, Any]:
    """Return the keys whose values are not the defaults of their fields, as plain data.

    A key that names its class (``kind`` of a stage, ``name`` of an algorithm) always counts: an
    online and an offline stage that leave everything else out are not the same.

    Example:
        >>> select_set_keys(Recipe.model_validate({"seed": 3, "threads": 1}))
        {"seed": 3}
    """
    set_keys = {}
    for key, field in type(config).model_fields.items():
        value = getattr(config, key)
        # Defaults that an algorithm sets are not those of the field: they count as set, so that a
        # changed ``stage_defaults`` changes the digest of what it changes.
        default = field.get_default(call_default_factory=True)
        if _names_class(field) or field.is_required() or value != default:
            set_keys[key] = _to_plain_data(value)
    return set_keys


def _names_class(field: FieldInfo) -> bool:
    # ``Literal["online"]``: a field with one possible value is the tag of a union.
    choices = typing.get_args(field.annotation)
    return typing.get_origin(field.annotation) is Literal and len(choices) == 1


def _to_plain_data(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return select_set_keys(value)
    if isinstance(value, dict):
        return {key: _to_plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain_data(item) for item in value]
    return to_jsonable_python(value)
