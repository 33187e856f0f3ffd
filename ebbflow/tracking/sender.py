"""Delivery to a node's child run: found by its tags, resumed when the node is retried, and nothing
delivered twice.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from mlflow import MlflowClient
from mlflow.entities import Metric, Run
from mlflow.exceptions import MlflowException

from ebbflow.data.records import TrackedRun
from ebbflow.recipe.base import sanitize_text
from ebbflow.recipe.secrets import redact_secrets
from ebbflow.tracking.delivery import WRITERS
from ebbflow.tracking.pending import PendingRecords, Status
from ebbflow.tracking.reconcile import remove_ending
from ebbflow.tracking.store import (
    AWAY,
    DIGEST,
    EXECUTION,
    NODE,
    PARENT,
    REFUSED,
    ROLE,
    connect_to_store,
    create_run,
    find_run,
    read_execution_name,
)

METRICS_PER_BATCH = 1000
"""MLflow's own limit of a request."""
MAX_LISTED = 40
OTHERS = "others"
"""Kinds of refused records that the tag lists, and its name for the rest."""

logger = logging.getLogger(__name__)


class OpenRun:
    """A run that records are delivered to, and what it held when it was opened.

    Example:
        A retry whose checkpoint is at step 3, of a run that holds the steps up to 5::

            run = open_child_run(tracked, "1.1 online")
            run.holds_metric(Metric("loss", 0.2, timestamp, step=5))  # True: it is skipped
            run.holds_metric(Metric("loss", 0.2, timestamp, step=6))  # False: it is sent

    Attributes:
        refused: what MLflow refused of earlier attempts.
    """

    def __init__(self, client: MlflowClient, run: Run) -> None:
        self.client = client
        self.run_id = str(run.info.run_id)
        self.refused = Counter[str](json.loads(run.data.tags.get(REFUSED, "{}")))
        # The steps of each metric, None until they are asked for. A history is a request for each
        # metric, and a first attempt, whose run holds nothing, needs none of them.
        self._held: dict[str, set[int] | None] = dict.fromkeys(run.data.metrics)

    def holds_metric(self, metric: Metric) -> bool:
        """Whether the run held a value of this metric at its step."""
        if metric.key not in self._held:
            return False
        # All steps and not the last one: on the parent, a late stage fills steps in between.
        steps = self._held[metric.key]
        if steps is None:
            steps = {held.step for held in self.client.get_metric_history(self.run_id, metric.key)}
            self._held[metric.key] = steps
        return metric.step in steps


def open_child_run(tracked: TrackedRun, node: str) -> OpenRun:
    """Find the node's run and set it RUNNING with its parent, or create it."""
    client = connect_to_store(tracked.tracking_uri)
    identity = {PARENT: tracked.run_id, NODE: node}
    run = find_run(client, tracked.experiment_id, identity)
    if run is None:
        run = create_run(
            client,
            tracked.experiment_id,
            identity,
            {ROLE: "node", DIGEST: tracked.recipe_digest},
            node,
        )
    else:
        client.update_run(run.info.run_id, status="RUNNING")
        # the attempt before this one failed the parent too (RunSender.end_run)
        client.update_run(tracked.run_id, status="RUNNING")
    _follow_recovery(client, tracked)
    return OpenRun(client, run)


def _follow_recovery(client: MlflowClient, tracked: TrackedRun) -> None:
    """Hand the parent run to the execution that goes on with it.

    A recovered execution of Flyte has a name of its own, and takes over the node that opened the
    run. ``reconcile`` would ask Flyte about the aborted one, and end a run that is alive.
    """
    execution = read_execution_name()
    if execution is None:
        return
    parent = client.get_run(tracked.run_id)
    if parent.data.tags.get(EXECUTION, execution) == execution:
        return
    client.set_tag(tracked.run_id, EXECUTION, execution)
    client.update_run(tracked.run_id, status="RUNNING")
    remove_ending(client, parent)


class RunSender:
    """Delivers a node's pending records in order, to its own run and to the parent.

    Every method raises whatever the transport raises while the store is away, busy or logged out:
    try again later.

    Attributes:
        run, parent: None until the store has answered.
        refused: records by kind, and values by metric, that MLflow has rejected for good.
    """

    def __init__(self, tracked: TrackedRun, node: str) -> None:
        self.tracked = tracked
        self.node = node
        self.run: OpenRun | None = None
        self.parent: OpenRun | None = None
        self.refused: Counter[str] = Counter()
        self._refused_metrics: set[str] = set()

    def send_pending(self, pending: PendingRecords) -> None:
        """Deliver everything. What arrived or was refused leaves ``pending``, also when a later
        record raises.
        """
        # Here and not in __init__: the store may be away when the node starts.
        if self.run is None:
            self.run = open_child_run(self.tracked, self.node)
        run = self.run
        self._send_metrics(run, pending.metrics, pending)
        if pending.parent_metrics:
            self._send_metrics(self._open_parent(), pending.parent_metrics, pending)
        # A record leaves pending only once it has arrived. If the next one raises, this one is
        # not sent again.
        while pending.records:
            record = pending.records[0]
            target = self._open_parent() if record.on_parent else run
            error = self._try_write(
                target, partial(WRITERS[record.kind], target.client, **record.arguments)
            )
            if error:
                self._count_refused(record.kind, 1, error)
            pending.remove_first_record()
        if pending.since is not None:
            self._tag_outage(run, pending, pending.since)
        if self.refused:
            # with those of earlier attempts, which repeat after a retry and count again
            run.client.set_tag(run.run_id, REFUSED, _format_counts_tag(run.refused + self.refused))

    def end_run(self, status: Status) -> None:
        """End the child run; one that failed or was killed ends the parent too, until its retry
        opens both again."""
        assert self.run, "send_pending() opens the run"
        self.run.client.set_terminated(self.run.run_id, status)
        if status != "FINISHED":
            self.run.client.set_terminated(self.tracked.run_id, status)

    def _open_parent(self) -> OpenRun:
        if self.parent is None:
            client = connect_to_store(self.tracked.tracking_uri)
            self.parent = OpenRun(client, client.get_run(self.tracked.run_id))
        return self.parent

    def _send_metrics(self, run: OpenRun, metrics: list[Metric], pending: PendingRecords) -> None:
        """Deliver ``metrics``, a list of ``pending``, in batches.

        MLflow takes a batch whole or not at all, so a refused one is delivered metric by metric.
        """
        # in place: it is the list of pending that gets shorter
        metrics[:] = [metric for metric in metrics if self._is_wanted(run, metric)]
        while metrics:
            batch = metrics[:METRICS_PER_BATCH]
            if self._try_write(run, partial(run.client.log_batch, metrics=batch)):
                self._send_each_metric(run, pending, batch)
            else:
                pending.remove_metrics(batch)

    def _is_wanted(self, run: OpenRun, metric: Metric) -> bool:
        """False if the run holds its step already, for MLflow would append it again, or if MLflow
        refuses the metric.
        """
        if metric.key in self._refused_metrics:
            self.refused[_format_metric_label(metric.key)] += 1
            return False
        return not run.holds_metric(metric)

    def _send_each_metric(
        self, run: OpenRun, pending: PendingRecords, batch: Sequence[Metric]
    ) -> None:
        # By key: MLflow refuses a metric for its name, thus all of its values. Later values of a
        # refused key are not even sent (_is_wanted), or each batch would be taken apart.
        for key in dict.fromkeys(metric.key for metric in batch):
            values = [metric for metric in batch if metric.key == key]
            error = self._try_write(run, partial(run.client.log_batch, metrics=values))
            if error:
                self._refused_metrics.add(key)
                self._count_refused(_format_metric_label(key), len(values), error)
            pending.remove_metrics(values)

    def _try_write(self, run: OpenRun, call: Callable[..., object]) -> Exception | None:
        """Make the call. Returns the error if MLflow will never accept it: then it must not block
        what is behind it.
        """
        try:
            call(run_id=run.run_id)
        except (MlflowException, FileNotFoundError, ValueError, TypeError) as error:
            if isinstance(error, MlflowException) and error.get_http_status_code() != 400:
                raise
            # A server that has lost its database says 400 as well. This tag has the value that it
            # has already and cannot be refused, so if it fails too, the store is away.
            assert self.run, "send_pending() opens the run"
            self.run.client.set_tag(self.run.run_id, NODE, self.node)
            return error
        return None

    def _count_refused(self, what: str, count: int, error: Exception) -> None:
        if not self.refused[what]:
            reason = sanitize_text(redact_secrets(str(error)))
            logger.warning(
                "node %s: MLflow refuses %s; they are dropped and counted: %s",
                self.node,
                what,
                reason,
            )
        self.refused[what] += count

    def _tag_outage(self, run: OpenRun, pending: PendingRecords, since: float) -> None:
        """After an outage, tag the run with its length and its effect, for the report."""
        # seconds and late records add up over the outages of a node; pending adds up the lost ones
        earlier = json.loads(run.client.get_run(run.run_id).data.tags.get(AWAY, "{}"))
        seconds = round(time.time() - since + earlier.get("seconds", 0), 1)
        tag = {
            "seconds": seconds,
            "late": pending.late + earlier.get("late", 0),
            "lost": pending.lost,
        }
        run.client.set_tag(run.run_id, AWAY, json.dumps(tag))
        logger.warning(
            "node %s: the MLflow store is back; all pending records were delivered", self.node
        )
        pending.since = None
        pending.late = 0


def _format_metric_label(key: str) -> str:
    return f"metric {sanitize_text(key, 80)}"


def _format_counts_tag(counts: Counter[str]) -> str:
    """JSON short enough for a tag: the most frequent, and how many others."""
    # OTHERS of an earlier attempt's tag is a sum and no kind
    kinds = Counter({what: count for what, count in counts.items() if what != OTHERS})
    listed = dict(kinds.most_common(MAX_LISTED))
    others = counts.total() - sum(listed.values())
    if others:
        listed[OTHERS] = others
    return json.dumps(listed, ensure_ascii=False)
