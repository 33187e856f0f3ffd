"""Delivery to a node's child run: found by its tags, resumed when the node is retried, and nothing delivered twice."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from ebbflow.data.records import TrackedRun
from ebbflow.recipe.base import sanitize
from ebbflow.recipe.secrets import redact
from ebbflow.tracking.delivery import WRITERS
from ebbflow.tracking.pending import PendingRecords, Status
from ebbflow.tracking.store import AWAY, DIGEST, NODE, PARENT, REFUSED, ROLE, connect, create_run, find, last_steps

METRICS_PER_BATCH = 1000
MAX_LISTED, OTHERS = 40, "others"
"""Kinds of refused records that the tag lists, and its name for the rest."""

logger = logging.getLogger(__name__)


class ChildRun(NamedTuple):
    """An open child run.

    Attributes:
        last_steps: the last step of each metric that the run held when it was opened.
        refused: what MLflow refused of earlier attempts.
    """

    client: MlflowClient
    run_id: str
    last_steps: dict[str, int]
    refused: Counter[str]


def open_child_run(tracked: TrackedRun, node: str) -> ChildRun:
    """Find the node's run and set it RUNNING with its parent, or create it."""
    client = connect(tracked.tracking_uri)
    identity = {PARENT: tracked.run_id, NODE: node}
    run = find(client, tracked.experiment_id, identity)
    if run is None:
        run = create_run(client, tracked.experiment_id, identity, {ROLE: "node", DIGEST: tracked.recipe_digest}, node)
    else:
        client.update_run(run.info.run_id, status="RUNNING")
        client.update_run(tracked.run_id, status="RUNNING")
    refused = Counter(json.loads(run.data.tags.get(REFUSED, "{}")))
    return ChildRun(client, run.info.run_id, last_steps(client, run), refused)


class RunSender:
    """Delivers a node's pending records in order.

    Every method raises whatever the transport raises while the store is away, busy or logged out: try again later.

    Attributes:
        run: None until the store has answered.
        refused: records by kind, and values by metric, that MLflow has rejected for good.
    """

    def __init__(self, tracked: TrackedRun, node: str) -> None:
        self.tracked, self.node = tracked, node
        self.run: ChildRun | None = None
        self.refused: Counter[str] = Counter()
        self._refused_metrics: set[str] = set()

    def send(self, pending: PendingRecords) -> None:
        """Deliver everything. What arrived or was refused leaves ``pending``, also when a later record raises."""
        run = self.run = self.run or open_child_run(self.tracked, self.node)
        self._send_metrics(run, pending)
        while pending.records:
            kind, arguments = pending.records[0]
            if error := self._rejection(run, partial(WRITERS[kind], run.client, **arguments)):
                self._count_refused(kind, 1, error)
            pending.remove_first_record()
        if pending.since is not None:
            self._log_outage(run, pending, pending.since)
        if self.refused:
            run.client.set_tag(run.run_id, REFUSED, _as_tag(run.refused + self.refused))

    def end(self, status: Status) -> None:
        """End the child run; a failed node fails the parent too, until its retry opens both again."""
        assert self.run, "send() opens the run"
        self.run.client.set_terminated(self.run.run_id, status)
        if status == "FAILED":
            self.run.client.set_terminated(self.tracked.run_id, status)

    def _send_metrics(self, run: ChildRun, pending: PendingRecords) -> None:
        """In batches. MLflow takes a batch whole or not at all, so a refused one is delivered metric by metric."""
        pending.metrics = [metric for metric in pending.metrics if self._is_wanted(run, metric)]
        while batch := pending.metrics[:METRICS_PER_BATCH]:
            if self._rejection(run, partial(run.client.log_batch, metrics=batch)):
                self._send_each_metric(run, pending, batch)
            else:
                pending.remove_metrics(batch)

    def _is_wanted(self, run: ChildRun, metric: Metric) -> bool:
        """False if the run holds its step already, for MLflow would append it again, or if MLflow refuses the metric."""
        if metric.key in self._refused_metrics:
            self.refused[_metric_label(metric.key)] += 1
            return False
        return metric.step > run.last_steps.get(metric.key, -1)

    def _send_each_metric(self, run: ChildRun, pending: PendingRecords, batch: Sequence[Metric]) -> None:
        for key in dict.fromkeys(metric.key for metric in batch):
            values = [metric for metric in batch if metric.key == key]
            if error := self._rejection(run, partial(run.client.log_batch, metrics=values)):
                self._refused_metrics.add(key)
                self._count_refused(_metric_label(key), len(values), error)
            pending.remove_metrics(values)

    def _rejection(self, run: ChildRun, call: Callable[..., object]) -> Exception | None:
        """Make the call. Returns the error if MLflow will never accept it: then it must not block what is behind it."""
        try:
            call(run_id=run.run_id)
        except (MlflowException, FileNotFoundError, ValueError, TypeError) as error:
            if isinstance(error, MlflowException) and error.get_http_status_code() != 400:
                raise
            run.client.set_tag(run.run_id, NODE, self.node)  # raises too if the server says 400 because its database is away
            return error
        return None

    def _count_refused(self, what: str, count: int, error: Exception) -> None:
        if not self.refused[what]:
            reason = sanitize(redact(str(error)))
            logger.warning("node %s: MLflow refuses %s; they are dropped and counted: %s", self.node, what, reason)
        self.refused[what] += count

    def _log_outage(self, run: ChildRun, pending: PendingRecords, since: float) -> None:
        """After an outage, tag the run with its length and its effect, for the report."""
        earlier = json.loads(run.client.get_run(run.run_id).data.tags.get(AWAY, "{}"))
        seconds = round(time.time() - since + earlier.get("seconds", 0), 1)
        tag = {"seconds": seconds, "late": pending.late + earlier.get("late", 0), "lost": pending.lost}
        run.client.set_tag(run.run_id, AWAY, json.dumps(tag))
        logger.warning("node %s: the MLflow store is back; all pending records were delivered", self.node)
        pending.since, pending.late = None, 0


def _metric_label(key: str) -> str:
    return f"metric {sanitize(key, 80)}"


def _as_tag(counts: Counter[str]) -> str:
    """JSON short enough for a tag: the most frequent, and how many others."""
    listed = dict(Counter({what: count for what, count in counts.items() if what != OTHERS}).most_common(MAX_LISTED))
    others = counts.total() - sum(listed.values())
    return json.dumps(listed | ({OTHERS: others} if others else {}), ensure_ascii=False)
