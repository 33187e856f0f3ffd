"""A node's logger. Metrics are worth less than GPU hours: no outage of the store may stop what is
being logged.
"""

from __future__ import annotations

import io
import json
import logging
import math
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.types as pt
from mlflow.data.pandas_dataset import from_pandas
from mlflow.entities import Metric
from PIL import Image

from ebbflow.data.records import TrackedRun
from ebbflow.metrics_server import record_values
from ebbflow.recipe.secrets import redact_secrets
from ebbflow.resume import InterruptedAttempt, how_to_resume, take_sigterm
from ebbflow.storage.disk import safe_join
from ebbflow.tracking import pending as pending_files
from ebbflow.tracking.curves import build_stage_curves
from ebbflow.tracking.delivery import flatten_settings
from ebbflow.tracking.node_sinks import NodeSinks
from ebbflow.tracking.pending import PendingRecords, Record, Status
from ebbflow.tracking.sender import RunSender
from ebbflow.tracking.system_metrics import log_system_metrics

FLUSH_AT = 256
"""Metrics that are collected before they are sent."""

logger = logging.getLogger(__name__)


@contextmanager
def open_node_run(
    tracked: TrackedRun, node: str, first_step: int | None = None
) -> Iterator[RunLogger]:
    """Open the child run of a node, with what an earlier attempt could not deliver.

    It ends FINISHED when the body ends, KILLED when the body was interrupted from outside, and
    FAILED when the body raises anything else. A killed process leaves it RUNNING; the retry resumes
    it.

    Example:
        ::

            with open_node_run(tracked, "1.1 online", first_step=0) as run_logger:
                for step in range(first_step_after_the_checkpoint, 20):
                    run_logger.log_metrics({"reward/mean": 0.41}, step)

    Args:
        node: unique in the execution and the same on every retry: ``1.2 offline training``, ``1.2
            offline rollout 0`` ...
        first_step: of a training stage, the training steps of the run before it: its metrics become
            curves of the parent run.
    """
    # In one process all nodes of a run follow each other, and the last stage may have ended by
    # itself before it could obey.
    if take_sigterm():
        raise InterruptedAttempt(f"SIGTERM came before {node} began; {how_to_resume()}")
    run_logger = RunLogger(tracked, node, first_step)
    start = time.monotonic()
    logger.info("%s started", node)
    run_logger.flush()  # shows the node in the UI from its first second
    try:
        with log_system_metrics(tracked, run_logger.run_id):
            yield run_logger
    except InterruptedAttempt:
        run_logger.close("KILLED")
        raise
    # BaseException, as Ctrl-C and sys.exit also end this attempt, and the run has to show it
    except BaseException:
        run_logger.close("FAILED")
        raise
    run_logger.close("FINISHED")
    logger.info("%s finished after %.1f s", node, time.monotonic() - start)


class RunLogger:
    """Logs what one node does. No method raises because the store is away.

    Metrics carry absolute steps. A retried node repeats the steps after its checkpoint; values that
    the run, or a file of the last attempt, already holds are skipped, because MLflow would append
    them again.

    Args:
        tracked, node, first_step: as for ``open_node_run``.

    Attributes:
        pending: what MLflow does not hold yet.
        sender: delivers it.
        sinks: other places that get the curves.
        non_finite: NaN and infinite values by metric; they are counted and not sent.
    """

    def __init__(self, tracked: TrackedRun, node: str, first_step: int | None = None) -> None:
        saved = _load_saved(tracked, node)
        self.pending = saved or PendingRecords(node)
        self.sender = RunSender(tracked, node)
        self.sinks = NodeSinks(tracked, node)
        self.non_finite: Counter[str] = Counter()
        self._has_file = saved is not None
        # An attempt without the store can log the steps after its checkpoint again although they
        # are in the file. Steps that MLflow itself holds are skipped by the sender.
        self._saved = {(metric.key, metric.step) for metric in self.pending.metrics}
        self._saved_on_parent = {
            (metric.key, metric.step) for metric in self.pending.parent_metrics
        }
        self._first_step = first_step
        self._flush_at = FLUSH_AT

    @property
    def run_id(self) -> str | None:
        """None until the store has answered."""
        return self.sender.run.run_id if self.sender.run else None

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """Log one value per metric for an absolute step; delivered in batches."""
        record_values(self.pending.node, values)
        now = int(time.time() * 1000)  # MLflow's timestamps are in ms
        for key, value in values.items():
            if (key, step) in self._saved:
                continue
            # MLflow takes NaN without a word and its charts then draw nothing for the metric
            if math.isfinite(value):
                self.pending.metrics.append(Metric(key, float(value), now, step))
            else:
                self._count_non_finite(key, value, step)
        if self._first_step is not None:
            self.log_curves(build_stage_curves(self.pending.node, values), self._first_step + step)
        self._flush_if_due()

    def log_curves(self, values: Mapping[str, float], step: int) -> None:
        """Log finite values to the parent run and the sinks; ``step`` counts the training steps of
        the whole run.
        """
        now = int(time.time() * 1000)
        finite = {key: float(value) for key, value in values.items() if math.isfinite(value)}
        self.pending.parent_metrics += [
            Metric(key, value, now, step)
            for key, value in finite.items()
            if (key, step) not in self._saved_on_parent
        ]
        # sinks are not buffered: each has its own delivery, and none may depend on MLflow's
        self.sinks.log(finite, step)
        self._flush_if_due()

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log parameters of this node, flattened."""
        self._add_record("params", params=flatten_settings(params))

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of this node's run; a retry replaces them."""
        for key, value in tags.items():
            self._add_record("tag", key=key, value=value)

    def log_image(self, key: str, image: Image.Image | bytes, step: int) -> None:
        """Log an image (PIL, or encoded) by key and step; one that a resumed run already holds is
        skipped.
        """
        if isinstance(image, Image.Image):
            buffer = io.BytesIO()
            image.save(buffer, "PNG")
            image = buffer.getvalue()
        self._add_record("image", key=key, content=image, step=step)

    def log_table(self, name: str, table: pa.Table) -> None:
        """Log a table without its binary columns as ``<name>.json``, for the UI's table view; a
        retry replaces it.
        """
        frame = _drop_binary_columns(table).to_pandas()
        self._add_record(
            "table", file=f"{name}.json", text=frame.to_json(orient="split", index=False)
        )

    def log_dataset(self, name: str, table: pa.Table, context: str, source: str) -> None:
        """Log name, digest and schema of a table that this node reads, without its binary columns;
        to the parent run, too.

        Args:
            context: its use: ``training``, ``evaluation`` ...
            source: the path or the URI of the table, or a file of Ebbflow's
                (``ebbflow:datasets/...``).
        """
        # MLflow would take it for the scheme of a URI, and refuse the dataset
        path = source.removeprefix("ebbflow:")
        with warnings.catch_warnings():
            # about integers that may lack values later: prompt ids never do
            warnings.filterwarnings("ignore", "Hint: Inferred schema")
            # a path is both a local file and an artifact of MLflow; it is only shown
            warnings.filterwarnings("ignore", "The specified dataset source can be interpreted")
            dataset = from_pandas(
                _drop_binary_columns(table).to_pandas(), source=path, name=name
            ).to_dict()
        self._add_record("dataset", dataset=dataset, context=context)
        self._add_record("dataset", on_parent=True, dataset=dataset, context=context)

    def log_artifact(self, path: str | Path, folder: str | None = None) -> None:
        """Log a file under ``folder`` of the run's artifacts.

        Raises:
            FileNotFoundError: there is no such file.
        """
        file = Path(path)
        if not file.is_file():
            raise FileNotFoundError(f"no file at {path} to log as an artifact")
        self._add_record(
            "file", path=f"{folder}/{file.name}" if folder else file.name, content=file.read_bytes()
        )

    def log_file(self, path: str, content: bytes) -> None:
        """Log a file at ``path`` of the run's artifacts; a retry replaces it.

        Raises:
            PathError: the path leads out of them.
        """
        safe_join(Path("artifacts"), path)
        self._add_record("file", path=path, content=content)

    def flush(self, status: Status | None = None) -> bool:
        """Deliver what is pending; call it at checkpoints. Returns whether all of it arrived.

        Args:
            status: how the run ends; None while the node runs.
        """
        try:
            self.sender.send_pending(self.pending)
            if status:
                self.sender.end_run(status)
            # Only now: a process that is killed before it leaves the file, and its retry delivers
            # the file again, which changes nothing.
            if self._has_file:
                pending_files.delete_pending(self.sender.tracked.folder, self.pending.node)
                self._has_file = False
        # a transport raises anything, and none of it may stop the training
        except Exception as error:
            self._postpone_delivery(error)
            return False
        self._flush_at = FLUSH_AT
        return True

    def close(self, status: Status) -> None:
        """Deliver the rest and end the run. What cannot be delivered is saved in the run's folder
        for later.
        """
        if self.non_finite:
            tag = {"key": "ebbflow.non_finite_metrics", "value": json.dumps(dict(self.non_finite))}
            self.pending.records.append(Record("tag", tag))
        if not self.flush(status):
            self._save_pending(status)
        self.sinks.close()

    def _flush_if_due(self) -> None:
        self.pending.drop_excess()
        if self.pending.num_metrics >= self._flush_at:
            self.flush()

    def _add_record(self, kind: str, on_parent: bool = False, **arguments: Any) -> None:
        self.pending.records.append(Record(kind, arguments, on_parent))
        # During an outage it waits for the next flush: every failing call costs the training the
        # seconds of a timeout.
        if self.pending.since is None:
            self.flush()

    def _postpone_delivery(self, error: Exception) -> None:
        # one warning for an outage, not one for each attempt
        if self.pending.since is None:
            store = redact_secrets(self.sender.tracked.tracking_uri)
            reason = redact_secrets(str(error))
            logger.warning(
                "node %s: the MLflow store %s is away; records wait in memory: %s",
                self.pending.node,
                store,
                reason,
            )
            self.pending.since = time.time()
        # Attempts get rarer as the buffer fills: an outage of hours costs a few timeouts and not
        # thousands. A flush at a checkpoint still tries each time.
        self._flush_at = max(2 * self.pending.num_metrics, FLUSH_AT)

    def _save_pending(self, status: Status) -> None:
        pending = self.pending
        folder = self.sender.tracked.folder
        pending.status = status
        metrics = pending.num_metrics
        records = len(pending.records)
        ended = f"node {pending.node} ended while the MLflow store was away"
        try:
            uri = pending_files.save_pending(folder, pending)
        except Exception as error:  # as in flush
            metrics += pending.lost
            logger.warning(
                "%s: %d metrics and %d other records are lost; cannot save them in %s: %s",
                ended,
                metrics,
                records,
                folder,
                error,
            )
        else:
            logger.warning(
                "%s: %d metrics and %d other records wait in %s, %d metrics are lost",
                ended,
                metrics,
                records,
                uri,
                pending.lost,
            )

    def _count_non_finite(self, key: str, value: float, step: int) -> None:
        if not self.non_finite[key]:
            logger.warning(
                "node %s: metric %s is %s at step %d; such values are counted and not sent",
                self.pending.node,
                key,
                value,
                step,
            )
        self.non_finite[key] += 1


def _load_saved(tracked: TrackedRun, node: str) -> PendingRecords | None:
    """Load what an earlier attempt saved. Any file system may be behind the URI, and its errors
    must not stop the work.
    """
    try:
        return pending_files.load_pending(tracked.folder, node)
    except Exception as error:
        logger.warning(
            "node %s: cannot read the records saved in %s: %s", node, tracked.folder, error
        )
        return None


def _drop_binary_columns(table: pa.Table) -> pa.Table:
    """Drop images and latents, which do not belong in tables that a browser loads."""
    binary = (pt.is_binary, pt.is_large_binary, pt.is_fixed_size_binary)
    columns = [
        field.name
        for field in table.schema
        # an extension type of Arrow is a tensor, which no cell can show
        if not isinstance(field.type, pa.BaseExtensionType)
        and not any(is_type(field.type) for is_type in binary)
    ]
    return table.select(columns)
