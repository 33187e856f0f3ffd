"""What Flyte caches: a task's outputs are reused by the same run, or by all runs."""

from __future__ import annotations

import hashlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from flytekit import Cache, FlyteContextManager, map_task
from flytekit.core import local_cache
from pydantic import BaseModel

import ebbflow
from ebbflow.storage.identity import compute_code_digest

CLONE = Path(__file__).parents[1]
# In a clone its root; an installed package has no ``pyproject.toml`` above it, and no place for
# files.
_FOLDER = CLONE if (CLONE / "pyproject.toml").is_file() else Path.cwd()
LOCAL_CACHE = Path(os.environ.get("EBBFLOW_LOCAL_CACHE") or _FOLDER / "runs" / "flyte" / "cache")
"""Flyte's cache of local runs, in the clone or else in the working directory. It points into
``runs``, so it lies there and is deleted with them; flytekit's own, in the home folder, is shared
by all Flyte projects of a user and outlives their files.
"""
local_cache.CACHE_LOCATION = str(LOCAL_CACHE)  # flytekit has no setting for it

ONCE_PER_RUN = Cache(version="1")
"""For tasks with the run among their inputs: a local run that died resumes after its last finished
task.

The version does not cover the code, because a run is only resumed with the code that started it
(tasks/start_run.py).
"""


def cache_for_all_runs(
    output: type[BaseModel] | None, *sources: str, ignored: tuple[str, ...] = ("run",)
) -> Cache:
    """Return the cache of outputs that depend on the other inputs, and on these sources of the
    library, but not on the run that logs them.

    Args:
        output: the type of the output. Flyte's own key does not have its fields, as types are sent
            without a schema (``tasks.transformers``). None for files.
        ignored: inputs that the output does not depend on, or that another input is a digest of.
    """
    library = Path(ebbflow.__file__).parent
    version = compute_schema_digest(output) if output else "files"
    if sources:
        version += compute_code_digest(*(library / source for source in sources))[:16]
    # Serialised: of two runs that start together one makes the output, and the other waits for it.
    return Cache(version=version, serialize=True, ignored_inputs=ignored)


def compute_schema_digest(model: type[BaseModel]) -> str:
    """Compute a digest of the fields of a model and of the models in it, without their
    descriptions.
    """
    schema = _drop_descriptions(model.model_json_schema())
    return hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()[:8]


def _drop_descriptions(schema: Any) -> Any:
    """Return a JSON schema without what only people read."""
    if isinstance(schema, list):
        return [_drop_descriptions(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    fields = {}
    for key, value in schema.items():
        # A field may be called "description"; then its value is a schema, not a text.
        if key != "description" or not isinstance(value, str):
            fields[key] = _drop_descriptions(value)
    return fields


def map_over_values(bound: partial[Any], **values: Any) -> Any:
    """Map a task, bound to its other inputs, over the values of its first; in a local execution,
    call it once per value.

    Flyte caches those calls, while a local map task that dies would start again from its first
    value.
    """
    # In a dynamic the context decides: on a cluster it compiles nodes, on this machine it runs
    # them.
    execution = FlyteContextManager.current_context().execution_state
    if execution is None or not execution.is_local_execution():
        return map_task(bound)(**values)
    ((name, items),) = values.items()
    return [bound(**{name: item}) for item in items]
