"""What MLflow could not be told because it was away: files in the run's folder, one per node, until it can be told.

A file is JSON lines: how the node ended, its metrics, its other records. It is written whole or not at all.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import fsspec
from mlflow.entities import Metric

FOLDER = "waiting-for-mlflow"


class Record(NamedTuple):
    """Something to tell MLflow beside metrics, as plain data: what it is, and the arguments of what tells it."""

    what: str
    about: Mapping[str, Any]


class Waiting(NamedTuple):
    """What waits for the store.

    Attributes:
        since: when it went away, in seconds since 1970.
        lost: metrics that were too many to keep.
    """

    node: str
    status: str
    since: float
    lost: int
    metrics: Sequence[Metric]
    records: Sequence[Record]


def write(folder: str, waiting: Waiting) -> str:
    """Keep it in the run's folder, a path or a URI; returns where."""
    place = _place(folder, waiting.node)
    head = {"node": waiting.node, "status": waiting.status, "since": waiting.since, "lost": waiting.lost}
    metrics = [["metric", metric.key, metric.value, metric.timestamp, metric.step] for metric in waiting.metrics]
    lines = [json.dumps(line, default=_as_text) + "\n" for line in (head, *metrics, *waiting.records)]
    store, path = _opened(place)
    store.makedirs(path.rpartition("/")[0], exist_ok=True)
    store.pipe_file(f"{path}.unfinished", "".join(lines).encode())
    store.mv(f"{path}.unfinished", path)
    return place


def read(folder: str, node: str) -> Waiting | None:
    """What waits of a node, if anything does."""
    store, path = _opened(_place(folder, node))
    return _parsed(store.cat_file(path)) if store.exists(path) else None


def nodes(folder: str) -> list[str]:
    """The nodes of which something waits."""
    store, path = _opened(f"{folder}/{FOLDER}")
    if not store.exists(path):
        return []
    return [_parsed(store.cat_file(file)).node for file in sorted(store.ls(path, detail=False)) if file.endswith(".jsonl")]


def remove(folder: str, node: str) -> None:
    """It was told."""
    store, path = _opened(_place(folder, node))
    store.rm_file(path)


def _opened(place: str) -> tuple[Any, str]:
    """The store of a path or a URI, as it is now, and the path in it."""
    store, path = fsspec.core.url_to_fs(place)
    store.invalidate_cache()
    return store, path


def _place(folder: str, node: str) -> str:
    return f"{folder}/{FOLDER}/{re.sub(r'[^A-Za-z0-9.]+', '-', node)}.jsonl"


def _parsed(content: bytes) -> Waiting:
    head, *rest = (json.loads(line, object_hook=_as_bytes) for line in content.splitlines())
    metrics = [Metric(*values) for what, *values in rest if what == "metric"]
    return Waiting(**head, metrics=metrics, records=[Record(*record) for record in rest if record[0] != "metric"])


def _as_text(value: Any) -> dict[str, str]:
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} cannot be kept for MLflow")
    return {"base64": base64.b64encode(value).decode()}


def _as_bytes(value: dict[str, Any]) -> Any:
    return base64.b64decode(value["base64"]) if value.keys() == {"base64"} else value
