"""Checks that a folder has the layout of a family's base model, by its names and its index, without
importing torch or diffusers: a check of a recipe asks no more of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ebbflow.recipe.families import FAMILIES

INDEX = "model_index.json"
"""The list of a pipeline folder's parts."""
MODULAR_INDEX = "modular_model_index.json"
"""The same of a modular pipeline's."""


class ModelError(Exception):
    """A base model that cannot be used: names the folder or the key, what is wrong and how to fix
    it.
    """


def find_index(folder: Path) -> Path:
    """The list of a pipeline folder's parts; that of a modular pipeline where the folder has no
    other.
    """
    modular = folder / MODULAR_INDEX
    has_modular_alone = modular.is_file() and not (folder / INDEX).is_file()
    return modular if has_modular_alone else folder / INDEX


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object that a file of a base-model folder holds.

    Raises:
        ModelError: there is no such file, or something else in it.
    """
    if not file.is_file():
        raise ModelError(f"{file} is missing; fetch the folder again")
    # RecursionError is that of lists nested a thousand deep.
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ModelError(
            f"{file} is not the JSON object that diffusers writes; fetch the folder again"
        )
    return content


def check_folder(folder: Path, family: str) -> None:
    """Check that a folder has the layout of one of our families, without loading it.

    Raises:
        ModelError: there is no such folder, files are missing, or it is the folder of another
            pipeline.
    """
    record = FAMILIES[family]
    if record.trains_base_model:
        fix = "leave model.path out to train one, or name another folder"
    else:
        fix = (
            f"give the folder of a {record.pipeline}, or a Hugging Face repository with its commit"
            " as model.revision"
        )
    # The three ways in which a folder is the wrong one, from the coarsest to the finest.
    if not folder.is_dir():
        raise ModelError(f"model.path = {str(folder)!r}: there is no base-model folder; {fix}")
    missing_files = [name for name in record.folder_files if not (folder / name).exists()]
    if missing_files:
        raise ModelError(
            f"{folder} is not a {family} base model: {', '.join(missing_files)} missing; {fix}"
        )
    # A folder of a diffusers pipeline has all its files, too: only its index tells what it is.
    pipeline = read_json_object(find_index(folder)).get("_class_name")
    if pipeline != record.pipeline:
        raise ModelError(
            f"{folder} is a {pipeline}, and model.family = {family!r} is a {record.pipeline};"
            f" {_suggest_family(pipeline)}"
        )


def _suggest_family(pipeline: Any) -> str:
    """Say what to do with a folder of this pipeline."""
    # Without glyph, whose folders name the pipeline of SD3 but lack its VAE.
    records = {name: record for name, record in FAMILIES.items() if record.diffusers}
    for name, record in records.items():
        # Several families may share a pipeline; the first one is named.
        if record.pipeline == pipeline:
            return f"set model.family to {name}"
    return f"name a folder of {', '.join(records)}"
