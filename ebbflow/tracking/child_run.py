"""The child run of a node, found by tags and resumed when the node is tried again.

What costs nothing to lose must never stop what costs GPU hours: a node's metrics, pictures and tables wait in memory while the
store is away and are delivered at a later flush; what still waits when the node ends is kept in the run's folder, and delivered
by its next attempt or at the end of the run (``ebbflow.tracking.outage``).
"""

from __future__ import annotations

import io
import json
import logging
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.types as pt
from mlflow import MlflowClient
from mlflow.data.pandas_dataset import from_pandas
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from PIL import Image

from ebbflow.data.records import TrackedRun
from ebbflow.recipe.base import printable
from ebbflow.recipe.secrets import cleaned
from ebbflow.storage.disk import safe_join
from ebbflow.tracking import waiting
from ebbflow.tracking.delivery import DELIVER, flatten
from ebbflow.tracking.store import AWAY, DIGEST, NODE, PARENT, REFUSED, ROLE, connect, create_run, find, last_steps
from ebbflow.tracking.waiting import Record, Waiting

METRICS_PER_BATCH = 1000
FLUSH_AT = 256
"""Metrics that are gathered before they are sent."""
MOST_LISTED, OTHERS = 40, "others"
"""Kinds of refused records that a tag names, and what it calls the rest."""
MOST_WAITING = 100_000
"""Metrics kept while the store is away (some 30 MB); beyond it the oldest are dropped, and counted."""

log = logging.getLogger(__name__)


@contextmanager
def node_run(tracked: TrackedRun, node: str) -> Iterator[Node]:
    """The child run of one node, resumed when the node is retried, with what an earlier attempt could not deliver.

    It ends FINISHED when the body ends, FAILED when the body raises, and then takes the parent with it until the retry. A
    process that is killed leaves it RUNNING; the retry resumes it.

    Args:
        node: unique in the execution, the same on every retry: ``1.2 offline training``, ``1.2 offline rollout 0`` ...
    """
    recorder = Node.taken_up(tracked, node)
    recorder.flush()  # shows the node in the UI from its first second
    try:
        yield recorder
    except BaseException:
        recorder.close("FAILED")
        raise
    recorder.close("FINISHED")


class Node:
    """Records what one node does. No method raises because the store is away; see the module's docstring.

    Metrics carry absolute steps. A retried node goes back to its checkpoint and repeats the steps after it: values at or before
    the last step that the run already holds for a key, or that an earlier attempt kept, are skipped, because MLflow would append
    them a second time.
    """

    def __init__(self, tracked: TrackedRun, node: str) -> None:
        self.name = node
        self.non_finite: Counter[str] = Counter()
        """How many values of each metric were NaN or infinite, and therefore not sent."""
        self.dropped = 0
        """Metrics lost because the store was away for too long."""
        self.refused: Counter[str] = Counter()
        """How many records of each kind, or values of each metric, MLflow would not take."""
        self.run_id: str | None = None
        """None until the store has answered."""
        self._not_metrics: set[str] = set()
        self._refused_before: Counter[str] = Counter()
        self._tracked = tracked
        self._client: MlflowClient | None = None
        self._last_step: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self._metrics: list[Metric] = []
        self._waiting: list[Record] = []
        self._flush_at = FLUSH_AT
        self._away_since: float | None = None
        self._late = 0
        self._kept = False

    @staticmethod
    def taken_up(tracked: TrackedRun, node: str) -> Node:
        """The recorder of a node, with what an earlier attempt had to keep."""
        recorder = Node(tracked, node)
        try:
            kept = waiting.read(tracked.folder, node)
        except Exception as error:  # any store of files may be behind a URI, and a record must not stop the work
            log.warning("node %s: what waits for MLflow in %s cannot be read: %s", node, tracked.folder, error)
            return recorder
        if kept:
            recorder._metrics, recorder._waiting = list(kept.metrics), list(kept.records)
            recorder._taken = {metric.key: metric.step for metric in kept.metrics}
            recorder._away_since, recorder.dropped, recorder._kept = kept.since, kept.lost, True
        return recorder

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """Keep one value per metric for an absolute step; delivered in batches."""
        now = int(time.time() * 1000)
        for key, value in values.items():
            if step <= self._taken.get(key, -1):
                continue
            if key in self._not_metrics:
                self.refused[_shortened(key)] += 1
                continue
            if math.isfinite(value):
                self._metrics.append(Metric(key, float(value), now, step))
            else:
                self._count_non_finite(key, value, step)
        if (excess := len(self._metrics) - MOST_WAITING) > 0:
            del self._metrics[:excess]
            self.dropped += excess
        if len(self._metrics) >= self._flush_at:
            self.flush()

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Parameters of this node, flattened."""
        self._send("params", params=flatten(params))

    def log_image(self, key: str, image: Image.Image | bytes, step: int) -> None:
        """A picture (PIL, or encoded) that the UI shows by key and step; one that a resumed run already holds is skipped."""
        self._send("image", key=key, content=image if isinstance(image, bytes) else _as_png(image), step=step)

    def log_table(self, name: str, table: pa.Table) -> None:
        """A table without its binary columns, as ``<name>.json`` for the UI's table view; a retry replaces it."""
        frame = _without_binary(table).to_pandas()
        self._send("table", file=f"{name}.json", text=frame.to_json(orient="split", index=False))

    def log_dataset(self, name: str, table: pa.Table, context: str, source: str) -> None:
        """Name, digest and schema of a table that this node reads, without its binary columns.

        Args:
            context: what it is used for: ``training``, ``evaluation`` ...
            source: where it is stored: a path or a URI.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Hint: Inferred schema")  # prompt ids are integers, on purpose
            warnings.filterwarnings("ignore", "The specified dataset source can be interpreted")  # all of them mean a place
            dataset = from_pandas(_without_binary(table).to_pandas(), source=source, name=name).to_dict()
        self._send("dataset", dataset=dataset, context=context)

    def log_artifact(self, path: str | Path, folder: str | None = None) -> None:
        """A file, under ``folder`` of the run's artifacts."""
        file = _existing(path)
        self._send("file", path=f"{folder}/{file.name}" if folder else file.name, content=file.read_bytes())

    def log_file(self, path: str, content: bytes) -> None:
        """A file at ``path`` of the run's artifacts; a retry replaces it.

        Raises:
            PathError: the path leads out of them.
        """
        safe_join(Path("artifacts"), path)
        self._send("file", path=path, content=content)

    def flush(self) -> bool:
        """Deliver what waits; call it at checkpoints. Returns whether all of it arrived."""
        return self._deliver(None)

    def close(self, status: Literal["FINISHED", "FAILED"]) -> None:
        """Deliver the rest and end the run; what cannot be delivered is kept in the run's folder, for later."""
        if self.non_finite:
            tag = {"key": "ebbflow.non_finite_metrics", "value": json.dumps(dict(self.non_finite))}
            self._waiting.append(Record("tag", tag))
        if not self._deliver(status):
            self._keep(status)

    def _send(self, what: str, **about: Any) -> None:
        self._waiting.append(Record(what, about))
        if self._away_since is None:  # else it waits for the next flush: every failing call costs seconds of training
            self.flush()

    def _deliver(self, status: Literal["FINISHED", "FAILED"] | None) -> bool:
        """Deliver what waits, and end the run where there is a status to end it with."""
        try:
            client, run_id = self._open()
            self._deliver_metrics(client, run_id)
            self._deliver_waiting(client, run_id)
            self._tell_outage(client, run_id)
            if self.refused:
                client.set_tag(run_id, REFUSED, _as_tag(self._refused_before + self.refused))
            if status:
                client.set_terminated(run_id, status)
            if status == "FAILED":
                client.set_terminated(self._tracked.run_id, status)
            if self._kept:
                waiting.remove(self._tracked.folder, self.name)
                self._kept = False
        except Exception as error:  # a transport raises anything, and none of it may stop the training
            self._postpone(error)
            return False
        self._flush_at = FLUSH_AT
        return True

    def _tell_outage(self, client: MlflowClient, run_id: str) -> None:
        """After an outage: how long it was and what it did to the records of this node, for the report."""
        if self._away_since is None:
            return
        told = json.loads(client.get_run(run_id).data.tags.get(AWAY, "{}"))
        seconds = time.time() - self._away_since + told.get("seconds", 0)
        tag = {"seconds": round(seconds, 1), "late": self._late + told.get("late", 0), "lost": self.dropped}
        client.set_tag(run_id, AWAY, json.dumps(tag))
        log.warning("node %s: the MLflow store is back, everything that waited was delivered", self.name)
        self._away_since, self._late = None, 0

    def _keep(self, status: Literal["FINISHED", "FAILED"]) -> None:
        count = (len(self._metrics), len(self._waiting))
        since = self._away_since or time.time()
        try:
            place = waiting.write(
                self._tracked.folder, Waiting(self.name, status, since, self.dropped, self._metrics, self._waiting)
            )
        except Exception as error:  # as above
            log.warning(
                "node %s ended while the MLflow store was away: %d metrics and %d other records are lost, as they cannot be "
                "kept in %s: %s",
                *(self.name, self.dropped + count[0], count[1], self._tracked.folder, error),
            )
            return
        log.warning(
            "node %s ended while the MLflow store was away: %d metrics and %d other records wait in %s, %d metrics are lost",
            *(self.name, *count, place, self.dropped),
        )

    def _open(self) -> tuple[MlflowClient, str]:
        """Find or create the child run, on first contact with the store."""
        if self._client is None or self.run_id is None:
            client = connect(self._tracked.tracking_uri)
            known_by = {PARENT: self._tracked.run_id, NODE: self.name}
            run = find(client, self._tracked.experiment_id, known_by)
            if run is None:
                tags = {ROLE: "node", DIGEST: self._tracked.recipe_digest}
                run = create_run(client, self._tracked.experiment_id, known_by, tags, self.name)
            else:
                self._refused_before = Counter(json.loads(run.data.tags.get(REFUSED, "{}")))
                client.update_run(run.info.run_id, status="RUNNING")
                client.update_run(self._tracked.run_id, status="RUNNING")
            self._last_step = last_steps(client, run)
            self._client, self.run_id = client, run.info.run_id
        return self._client, self.run_id

    def _deliver_metrics(self, client: MlflowClient, run_id: str) -> None:
        self._metrics = [metric for metric in self._metrics if metric.step > self._last_step.get(metric.key, -1)]
        while self._metrics:
            batch = self._metrics[:METRICS_PER_BATCH]
            if self._refusal(client, run_id, partial(client.log_batch, metrics=batch)):
                self._deliver_each(client, run_id, batch)
            del self._metrics[: len(batch)]
            self._late += len(batch) if self._away_since else 0

    def _deliver_each(self, client: MlflowClient, run_id: str, batch: Sequence[Metric]) -> None:
        """Metric by metric, as MLflow takes a batch whole or not at all."""
        for key in dict.fromkeys(metric.key for metric in batch):
            values = [metric for metric in batch if metric.key == key]
            if error := self._refusal(client, run_id, partial(client.log_batch, metrics=values)):
                self._not_metrics.add(key)
                self._refuse(_shortened(key), len(values), error)

    def _deliver_waiting(self, client: MlflowClient, run_id: str) -> None:
        while self._waiting:
            what, about = self._waiting[0]
            if error := self._refusal(client, run_id, partial(DELIVER[what], client, **about)):
                self._refuse(what, 1, error)
            self._waiting.pop(0)
            self._late += 1 if self._away_since else 0

    def _refusal(self, client: MlflowClient, run_id: str, call: Callable[..., object]) -> Exception | None:
        """Do it; why the store will never take it, which would block all that waits behind it.

        Raises:
            Exception: of whatever kind when the store is away, busy, or not logged in at the moment.
        """
        try:
            call(run_id=run_id)
        except (MlflowException, FileNotFoundError, ValueError, TypeError) as error:
            if isinstance(error, MlflowException) and error.get_http_status_code() != 400:
                raise
            client.set_tag(run_id, NODE, self.name)  # a server whose database is away says 400 too: this fails then as well
            return error
        return None

    def _refuse(self, what: str, count: int, error: Exception) -> None:
        if not self.refused[what]:
            reason = printable(cleaned(str(error)))
            log.warning("node %s: MLflow refuses %s, which is dropped and counted: %s", self.name, what, reason)
        self.refused[what] += count

    def _postpone(self, error: Exception) -> None:
        if self._away_since is None:
            store = cleaned(self._tracked.tracking_uri)
            log.warning("node %s: the MLflow store %s is away; records wait in memory: %s", self.name, store, cleaned(str(error)))
            self._away_since = time.time()
        # Attempts get rarer as the buffer fills, so that a store which is away for hours costs a few timeouts and not thousands.
        self._flush_at = max(2 * len(self._metrics), FLUSH_AT)

    def _count_non_finite(self, key: str, value: float, step: int) -> None:
        if not self.non_finite[key]:
            log.warning("node %s: metric %s is %s at step %d; it is counted and not sent", self.name, key, value, step)
        self.non_finite[key] += 1


def _shortened(key: str) -> str:
    return f"metric {printable(key, 80)}"


def _as_tag(counts: Counter[str]) -> str:
    """As JSON that no store cuts: the most frequent, and how many others."""
    named = Counter({what: count for what, count in counts.items() if what != OTHERS})
    listed = dict(named.most_common(MOST_LISTED))
    others = counts.total() - sum(listed.values())
    return json.dumps(listed | ({OTHERS: others} if others else {}), ensure_ascii=False)


def _existing(path: str | Path) -> Path:
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file at {path} to log as an artifact")
    return Path(path)


def _as_png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def _without_binary(table: pa.Table) -> pa.Table:
    """Pictures and latents do not belong into tables that a browser loads."""
    kept = [field.name for field in table.schema if not _is_bulky(field.type)]
    return table.select(kept)


def _is_bulky(kind: pa.DataType) -> bool:
    binary = pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_fixed_size_binary(kind)
    return binary or isinstance(kind, pa.BaseExtensionType)
