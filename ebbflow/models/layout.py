"""What can be told about a base-model folder without loading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ebbflow.recipe.model import PIPELINES


class ModelError(Exception):
    """A base-model folder that cannot be used: names the folder, what is wrong and the way out."""


def read_index(folder: Path) -> dict[str, Any]:
    """The ``model_index.json`` of a folder that has one.

    Raises:
        ModelError: it is not what diffusers writes.
    """
    try:
        index = json.loads((folder / "model_index.json").read_bytes())
    except (ValueError, RecursionError):
        index = None
    if not isinstance(index, dict):
        raise ModelError(f"{folder / 'model_index.json'} is not the JSON object that diffusers writes; fetch the folder again")
    return index


def check_configs(folder: Path) -> None:
    """Check that every configuration in a folder is a JSON object: diffusers takes any other for a place to fetch one from.

    Raises:
        ModelError: one is not.
    """
    for path in sorted(folder.rglob("*config.json")):
        try:
            config = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            config = None
        if not isinstance(config, dict):
            raise ModelError(f"{path} is not the JSON object that a configuration is; copy the folder again or make it again")


def check_layout(folder: Path, family: str) -> None:
    """Check that a folder says it is a pipeline of a family that diffusers has one for.

    Raises:
        ModelError: it does not; names what it is instead.
    """
    index, wanted = folder / "model_index.json", PIPELINES[family]
    if not index.is_file():
        raise ModelError(
            f"model.path = {str(folder)!r} is no pipeline folder: it has no model_index.json. Give the folder of a {wanted}; "
            "or the id of a Hugging Face repository, with its commit as model.revision"
        )
    found = read_index(folder).get("_class_name")
    if found != wanted:
        families = {name: family for family, name in PIPELINES.items()}
        hint = f"set model.family to {families[found]}" if found in families else f"the families are {', '.join(PIPELINES)}"
        raise ModelError(f"{folder} is a {found}, and model.family = {family!r} is a {wanted}; {hint}, or name another folder")
