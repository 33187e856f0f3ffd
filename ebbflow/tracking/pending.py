"""Records that MLflow does not hold yet: in memory while a node runs, in the run's folder once it
has ended without the store.

A saved file is JSON lines: a header, a line per metric, a line per other record. It is written
whole or not at all. The docstring of the room says why MLflow's asynchronous logging does not
replace this buffer.

Example:
    The file ``waiting-for-mlflow/1.1-online.jsonl`` of a stage that ended during an outage::

        {"node": "1.1 online", "status": "FAILED", "since": 1764076800.0, "lost": 0}
        ["metric", "reward/mean", 0.41, 1764076801000, 12]
        ["parent_metric", "reward/train", 0.41, 1764076801000, 52]
        ["params", {"params": {"lr": "0.0001"}}, false]
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import fsspec
from mlflow.entities import Metric

FOLDER = "waiting-for-mlflow"
UNFINISHED = ".unfinished"
METRIC = "metric"
PARENT_METRIC = "parent_metric"
"""First words of the lines of metrics."""
MAX_METRICS = 100_000
"""Pending metrics of a node (about 30 MB); beyond that the oldest are dropped and counted."""

Status = Literal["FINISHED", "FAILED", "KILLED"]


class Record(NamedTuple):
    """Anything but a metric, as plain data.

    Example:
        A file of the node's own run, with the arguments of ``delivery.WRITERS["file"]``::

            Record("file", {"path": "timeline.json", "content": b"{}"}, on_parent=False)

    Attributes:
        kind: names its writer in ``delivery.WRITERS``.
        arguments: of the writer, besides the client and the run. JSON values and bytes, as they
            are saved.
        on_parent: whether it goes to the parent run.
    """

    kind: str
    arguments: Mapping[str, Any]
    on_parent: bool = False


@dataclass
class PendingRecords:
    """What one node has logged and MLflow does not hold yet, in the order in which it was logged.

    Attributes:
        status: how the node ended; of a running node it says nothing.
        since: when the store went away, in seconds since 1970; None while it answers.
        late: records delivered since then.
        lost: metrics dropped because too many were pending.
        metrics, records: of the node's own run; a record may be of the parent.
        parent_metrics: of the parent run.
    """

    node: str
    status: Status = "FINISHED"
    since: float | None = None
    late: int = 0
    lost: int = 0
    metrics: list[Metric] = field(default_factory=list)
    parent_metrics: list[Metric] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    @property
    def num_metrics(self) -> int:
        return len(self.metrics) + len(self.parent_metrics)

    def drop_excess(self) -> None:
        """Drop and count the oldest metrics beyond ``MAX_METRICS``, of each of the two runs."""
        for metrics in (self.metrics, self.parent_metrics):
            excess = max(0, len(metrics) - MAX_METRICS)
            # the newest values say more of a run that still trains, so the oldest go
            del metrics[:excess]
            self.lost += excess

    def remove_metrics(self, delivered: Sequence[Metric]) -> None:
        """Forget these very metrics, which need no further attempt."""
        # by identity: a step that is logged twice makes two equal metrics, and one may be left
        gone = set(map(id, delivered))
        for metrics in (self.metrics, self.parent_metrics):
            metrics[:] = [metric for metric in metrics if id(metric) not in gone]
        self._count_late(len(delivered))

    def remove_first_record(self) -> None:
        """Forget the oldest record, which needs no further attempt."""
        del self.records[0]
        self._count_late(1)

    def _count_late(self, count: int) -> None:
        if self.since is not None:
            self.late += count


def save_pending(folder: str, pending: PendingRecords) -> str:
    """Write the records into the run's folder, a path or a URI. Returns the file's path or URI."""
    uri = _build_uri(folder, pending.node)
    header = {
        "node": pending.node,
        "status": pending.status,
        "since": pending.since,
        "lost": pending.lost,
    }
    kinds = {METRIC: pending.metrics, PARENT_METRIC: pending.parent_metrics}
    metrics = [
        [kind, one.key, one.value, one.timestamp, one.step]
        for kind, metrics_of_kind in kinds.items()
        for one in metrics_of_kind
    ]
    lines = [
        json.dumps(line, default=_encode_bytes) + "\n"
        for line in (header, *metrics, *pending.records)
    ]
    store, path = _open_file_system(uri)
    store.makedirs(path.rpartition("/")[0], exist_ok=True)
    # A process that is killed here must not leave half a file, which the next attempt would take
    # for everything that was pending.
    store.pipe_file(path + UNFINISHED, "".join(lines).encode())
    store.mv(path + UNFINISHED, path)
    return uri


def load_pending(folder: str, node: str) -> PendingRecords | None:
    """What an earlier attempt at the node saved, if anything. The file of one that was killed while
    it saved is removed.
    """
    store, path = _open_file_system(_build_uri(folder, node))
    if store.exists(path + UNFINISHED):
        store.rm_file(path + UNFINISHED)
    return _parse_pending(store.cat_file(path)) if store.exists(path) else None


def load_all_pending(folder: str) -> list[PendingRecords]:
    """What all nodes of the run have saved, by file name."""
    store, path = _open_file_system(f"{folder}/{FOLDER}")
    files = sorted(store.ls(path, detail=False)) if store.exists(path) else []
    return [_parse_pending(store.cat_file(file)) for file in files if file.endswith(".jsonl")]


def delete_pending(folder: str, node: str) -> None:
    """Remove the file of a node whose records have been delivered."""
    store, path = _open_file_system(_build_uri(folder, node))
    store.rm_file(path)


def _open_file_system(uri: str) -> tuple[Any, str]:
    """The file system of a path or a URI, without its listing cache, and the path in it."""
    store, path = fsspec.core.url_to_fs(uri)
    # fsspec shares one instance per process, and a listing that it cached hides the files that
    # other pods have written since
    store.invalidate_cache()
    return store, path


def _build_uri(folder: str, node: str) -> str:
    # a node's name has spaces, and nothing in it may lead out of the folder
    return f"{folder}/{FOLDER}/{re.sub(r'[^A-Za-z0-9.]+', '-', node)}.jsonl"


def _parse_pending(content: bytes) -> PendingRecords:
    header, *lines = (json.loads(line, object_hook=_decode_bytes) for line in content.splitlines())
    pending = PendingRecords(**header)
    for line in lines:
        if line[0] == METRIC:
            pending.metrics.append(Metric(*line[1:]))
        elif line[0] == PARENT_METRIC:
            pending.parent_metrics.append(Metric(*line[1:]))
        else:
            pending.records.append(Record(*line))
    return pending


# JSON has no bytes: files and images are objects with this one key, which no writer's arguments
# have.
def _encode_bytes(value: Any) -> dict[str, str]:
    if not isinstance(value, bytes):
        raise TypeError(f"cannot save {type(value).__name__} for MLflow")
    return {"base64": base64.b64encode(value).decode()}


def _decode_bytes(value: dict[str, Any]) -> Any:
    return base64.b64decode(value["base64"]) if value.keys() == {"base64"} else value
