"""Flyte's cache of local runs, without what it should no longer point at: an output that was
deleted, or damaged by a power loss, counts as not there, so that its task runs again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack
from flytekit.core.local_cache import LocalTaskCache
from flytekit.models.literals import Literal, LiteralMap

from ebbflow.recipe import Recipe

PATH_KEY = "path"
"""The key of a file or a folder in a Pydantic value, as flytekit serializes it."""

logger = logging.getLogger(__name__)
_find_outputs = LocalTaskCache.get


def forget_damaged_outputs() -> None:
    """Let the cache forget outputs that are not whole. Flytekit has no setting for it."""
    LocalTaskCache.get = staticmethod(find_whole_outputs)


def find_whole_outputs(
    task_name: str, cache_version: str, inputs: LiteralMap, ignored_inputs: tuple[str, ...]
) -> LiteralMap | None:
    """Find what the cache has of a task with these inputs; None if it has nothing, or if a file or
    folder of it is not whole.
    """
    outputs = _find_outputs(task_name, cache_version, inputs, ignored_inputs)
    if outputs is None:
        return None
    for literal in outputs.literals.values():
        for path in iterate_local_paths(literal):
            damage = explain_damage(path)
            if damage:
                logger.warning("%s runs again: %s", task_name.rpartition(".")[2], damage)
                return None
    return outputs


def explain_damage(path: Path) -> str | None:
    """Explain why an output cannot be used; None if it can."""
    from ebbflow.storage.artifacts import COMMIT, ArtifactError, verify_folder

    if not path.exists():
        return f"{path} is gone"
    if path.is_dir():
        # Folders of artifacts are committed; a user's own stage may return another.
        if not (path / COMMIT).exists():
            return None
        try:
            verify_folder(path)
        except ArtifactError as error:
            return str(error)
        return None
    if path.stat().st_size == 0:
        return f"{path} is empty"
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            pq.read_metadata(path)
        except (pa.ArrowException, OSError) as error:
            return f"{path} is no whole table ({error})"
    return None


def iterate_local_paths(literal: Literal) -> Iterator[Path]:
    """Yield the files and folders of this machine that a value has."""
    if literal.collection:
        for item in literal.collection.literals:
            yield from iterate_local_paths(item)
        return
    scalar = literal.scalar
    if scalar is None:
        return
    if scalar.blob and "://" not in scalar.blob.uri:
        yield Path(scalar.blob.uri)
    if scalar.binary:
        value = msgpack.unpackb(scalar.binary.value)
        # The paths of a recipe are what a user wrote, and no outputs: ``model: {path: org/name}``.
        if not isinstance(value, Mapping) or not value.keys() <= Recipe.model_fields.keys():
            yield from _iterate_paths_of_value(value)


def _iterate_paths_of_value(value: Any) -> Iterator[Path]:
    if isinstance(value, list):
        for item in value:
            yield from _iterate_paths_of_value(item)
    if isinstance(value, Mapping):
        path = value.get(PATH_KEY)
        if list(value) == [PATH_KEY] and isinstance(path, str) and "://" not in path:
            yield Path(path)
            return
        for item in value.values():
            yield from _iterate_paths_of_value(item)
