"""MLflow runs: one parent per execution, one child per node, both found by tags and resumed when a task is retried.

What costs nothing to lose must never stop what costs GPU hours: a node's metrics, pictures and tables wait in memory while the
store is away and are delivered at a later flush; what still waits when the node ends is kept in the run's folder, and delivered
by its next attempt or at the end of the run (``settle``). The parent run is different: it is opened before any work, so a store
that is down is an error there. Everything goes through ``MlflowClient``; MLflow's process-wide "active run" is never touched.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import sqlite3
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.types as pt
import yaml
from mlflow import MlflowClient
from mlflow.data.pandas_dataset import from_pandas
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run
from mlflow.exceptions import MlflowException
from PIL import Image

from ebbflow.disk import inside
from ebbflow.recipe import Recipe
from ebbflow.recipe.secrets import cleaned
from ebbflow.records import Evaluation, TrackedRun
from ebbflow.tracking import waiting
from ebbflow.tracking.waiting import Record, Waiting

EXECUTION, NODE, PARENT = "flyte.execution_id", "ebbflow.node", "mlflow.parentRunId"
ROLE, DIGEST = "ebbflow.role", "ebbflow.recipe_digest"
AWAY = "ebbflow.mlflow_away"
METRICS_PER_BATCH, PARAMS_PER_BATCH = 1000, 100
LONGEST_PARAM = 6000
FLUSH_AT = 256
"""Metrics that are gathered before they are sent."""
MOST_WAITING = 100_000
"""Metrics kept while the store is away (some 30 MB); beyond it the oldest are dropped, and counted."""

log = logging.getLogger(__name__)


class TrackingError(RuntimeError):
    """The tracking store cannot be used: names the store, the cause and the way out."""


# ---------------------------------------------------------------------------------------------------------------- the store


def resolve_tracking_uri(recipe: Recipe) -> str:
    """The recipe's store, else ``MLFLOW_TRACKING_URI``, else a SQLite file in the output folder."""
    if uri := recipe.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    if "://" in recipe.output:
        raise TrackingError(
            f"output {recipe.output} is no local folder, so there is no place for a SQLite store; "
            "set tracking.uri in the recipe or MLFLOW_TRACKING_URI to an MLflow server"
        )
    return f"sqlite:///{Path(recipe.output).absolute() / 'mlflow.db'}"


def connect(uri: str) -> MlflowClient:
    """A client whose requests end: without bounds one call to a silent server blocks for minutes."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] = "false"  # loading a pickle executes it
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def check_store(uri: str) -> None:
    """Fail within seconds when nothing can be tracked at ``uri``.

    Raises:
        TrackingError: a SQLite file or its folder cannot be written, or a server does not answer.
    """
    if database := _sqlite_file(uri):
        _check_sqlite(database, uri)
    else:
        _check_server(uri)


def _sqlite_file(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def _check_sqlite(database: Path, uri: str) -> None:
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=database.parent):
            pass  # SQLite writes its journal beside the file, so the folder must be writable too
        if database.exists():
            with closing(sqlite3.connect(database, timeout=5, isolation_level=None)) as connection:
                # reads the header and takes the write lock: whatever cannot be written says so here
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
    except (OSError, sqlite3.Error) as error:
        raise TrackingError(
            f"cannot write the MLflow store {uri}: {error}. Set 'output' to a writable folder, "
            "or tracking.uri (or MLFLOW_TRACKING_URI) to another store"
        ) from error


def _check_server(uri: str) -> None:
    try:
        connect(uri).search_experiments(max_results=1)
    except Exception as error:  # the client raises what its transport raises: requests, sqlalchemy, its own
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TrackingError(
            f"the MLflow store {cleaned(uri)} does not answer: {cleaned(cause)}. "
            "Start it, correct tracking.uri or MLFLOW_TRACKING_URI, or leave both out to track in a SQLite file in 'output'"
        ) from error


# ----------------------------------------------------------------------------------------------------------- the parent run


def start_run(recipe: Recipe, execution_id: str | None, tags: Mapping[str, str] | None = None) -> TrackedRun:
    """Open the parent run of an execution, or find it again when the execution is retried.

    Args:
        recipe: logged as parameters and as recipe.yaml.
        execution_id: what identifies the execution across retries; None (a run without an orchestrator) always opens a new run.
        tags: what ``stopped_run`` is to find it by.

    Raises:
        TrackingError: the store cannot be used, or the execution was already tracked with another recipe.
    """
    client, experiment_id = _store(recipe)
    run = _find(client, experiment_id, {ROLE: "execution", EXECUTION: execution_id}) if execution_id else None
    if run is None:
        run = client.create_run(experiment_id, tags=_parent_tags(recipe, execution_id) | dict(tags or {}), run_name=recipe.name)
    elif run.data.tags.get(DIGEST) != recipe.digest:
        raise TrackingError(
            f"execution {execution_id} is run {run.info.run_id} of recipe {run.data.tags.get(DIGEST, 'unknown')[:12]} "
            f"and now comes with {recipe.digest[:12]}; a changed recipe needs a new execution"
        )
    tracked = _tracked(recipe, run)
    open_run(recipe, tracked)
    return tracked


def stopped_run(recipe: Recipe, tags: Mapping[str, str]) -> TrackedRun | None:
    """The newest run of the recipe with these tags, to go on with (``open_run``); None when there is none to go on with.

    That is so when it has FINISHED, and when its folder is not on this machine: deleting the folder is how one begins anew.
    """
    client, experiment_id = _store(recipe)
    run = _find(client, experiment_id, {ROLE: "execution", DIGEST: recipe.digest, **tags}, order="DESC")
    if run is None or run.info.status == "FINISHED":
        return None
    tracked = _tracked(recipe, run)
    return tracked if Path(tracked.folder).is_dir() else None


def open_run(recipe: Recipe, tracked: TrackedRun) -> None:
    """Let the run be RUNNING, with its recipe as parameters and as recipe.yaml; doing it again changes nothing."""
    settle(tracked)
    client, settings = connect(tracked.tracking_uri), recipe.model_dump(mode="json")
    client.update_run(tracked.run_id, status="RUNNING")
    _log_params(client, tracked.run_id, flatten(settings))
    client.log_text(tracked.run_id, yaml.safe_dump(settings, sort_keys=False), "recipe.yaml")


def finish_run(tracked: TrackedRun, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
    """Set the status of the parent run."""
    connect(tracked.tracking_uri).set_terminated(tracked.run_id, status)


def close_run(tracked: TrackedRun, evaluations: Sequence[Evaluation], files: Sequence[Path]) -> None:
    """Put the run's headline on the parent (held-out means by policy version, the report) and close it.

    Best effort: what a run has learnt does not get lost because the store went away at its very end.
    """
    client, run_id = connect(tracked.tracking_uri), tracked.run_id
    now = int(time.time() * 1000)
    try:
        logged = _last_steps(client, client.get_run(run_id))
        metrics = [
            Metric(f"held_out/{name}", value, now, evaluation.policy_version)
            for evaluation in evaluations
            for name, value in evaluation.held_out.items()
            if f"held_out/{name}" not in logged  # a retry would append them again
        ]
        client.log_batch(run_id, metrics=metrics)
        for file in files:
            client.log_artifact(run_id, str(file))
        finish_run(tracked, "FINISHED")
    except Exception as error:
        log.warning("run %s could not be closed in MLflow: %s", run_id, cleaned(str(error)))


def flatten(value: Any, place: str = "") -> dict[str, str]:
    """Nested settings as ``{"stages.0.optimizer.lr": "0.0003"}``."""
    if isinstance(value, Mapping):
        items: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        return {place: str(value)}
    if not items:
        return {place: "[]" if isinstance(value, (list, tuple)) else "{}"}
    return {key: text for name, item in items for key, text in flatten(item, f"{place}.{name}" if place else str(name)).items()}


def _store(recipe: Recipe) -> tuple[MlflowClient, str]:
    """A client of the recipe's store, and the id of the recipe's experiment there."""
    uri = resolve_tracking_uri(recipe)
    check_store(uri)
    client = connect(uri)
    return client, _experiment(client, recipe, uri)


def _experiment(client: MlflowClient, recipe: Recipe, uri: str) -> str:
    name = recipe.tracking.experiment
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        database = _sqlite_file(uri)
        # MLflow would put artifacts into ./mlruns of wherever a task happens to run
        location = (database.absolute().parent / "mlartifacts").as_uri() if database else None
        try:
            return client.create_experiment(name, artifact_location=location)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = client.get_experiment_by_name(name)  # another execution was faster
    if experiment is None or experiment.lifecycle_stage != "active":
        raise TrackingError(
            f"experiment {name!r} was deleted in {cleaned(uri)}; restore it with "
            "`mlflow experiments restore`, or set tracking.experiment to another name"
        )
    return experiment.experiment_id


def _parent_tags(recipe: Recipe, execution_id: str | None) -> dict[str, str]:
    stages = " → ".join(f"{stage.kind} {stage.algorithm.name}" for stage in recipe.stages)
    note = f"Recipe **{recipe.name}**, seed {recipe.seed}: {recipe.rounds} × ({stages}), {recipe.policy.train} training."
    execution = {EXECUTION: execution_id} if execution_id else {}
    return {ROLE: "execution", DIGEST: recipe.digest, "mlflow.note.content": note, **execution}


def _find(
    client: MlflowClient, experiment_id: str, tags: Mapping[str, str | None], order: Literal["ASC", "DESC"] = "ASC"
) -> Run | None:
    """The oldest run with these tags, on which two racing attempts agree; with ``DESC`` the newest."""
    condition = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
    found = client.search_runs([experiment_id], condition, max_results=1, order_by=[f"attributes.start_time {order}"])
    return found[0] if found else None


def _tracked(recipe: Recipe, run: Run) -> TrackedRun:
    return TrackedRun(
        run_id=run.info.run_id,
        experiment_id=run.info.experiment_id,
        tracking_uri=resolve_tracking_uri(recipe),
        folder=_folder(recipe.output, f"{recipe.name}-{run.info.run_id[:8]}"),
        recipe_digest=recipe.digest,
        started_at=run.info.start_time / 1000,
    )


def _folder(output: str, name: str) -> str:
    return f"{output.rstrip('/')}/{name}" if "://" in output else str(Path(output).absolute() / name)


def _log_params(client: MlflowClient, run_id: str, params: Mapping[str, str]) -> None:
    """Parameters are immutable in MLflow: writing the same ones again on a retry is a no-op, others are refused."""
    entities = [Param(key, _cut(value)) for key, value in params.items()]
    for start in range(0, len(entities), PARAMS_PER_BATCH):
        client.log_batch(run_id, params=entities[start : start + PARAMS_PER_BATCH])


def _cut(value: str) -> str:
    if len(value) <= LONGEST_PARAM:
        return value
    note = f" … ({len(value)} characters)"
    return value[: LONGEST_PARAM - len(note)] + note


# ------------------------------------------------------------------------------------------------------------- a child run


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
        self.run_id: str | None = None
        """None until the store has answered."""
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
        inside(Path("artifacts"), path)
        self._send("file", path=path, content=content)

    def flush(self) -> bool:
        """Deliver what waits; call it at checkpoints. Returns whether all of it arrived."""
        return self._deliver(None)

    def close(self, status: Literal["FINISHED", "FAILED"]) -> None:
        """Deliver the rest and end the run; what cannot be delivered is kept in the run's folder (``settle``)."""
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
        """After an outage: how long it was and what it did to the records of this node, for ``settle``."""
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
            run = _find(client, self._tracked.experiment_id, {PARENT: self._tracked.run_id, NODE: self.name})
            if run is None:
                tags = {PARENT: self._tracked.run_id, NODE: self.name, ROLE: "node", DIGEST: self._tracked.recipe_digest}
                run = client.create_run(self._tracked.experiment_id, tags=tags, run_name=self.name)
            else:
                client.update_run(run.info.run_id, status="RUNNING")
                client.update_run(self._tracked.run_id, status="RUNNING")
            self._last_step = _last_steps(client, run)
            self._client, self.run_id = client, run.info.run_id
        return self._client, self.run_id

    def _deliver_metrics(self, client: MlflowClient, run_id: str) -> None:
        self._metrics = [metric for metric in self._metrics if metric.step > self._last_step.get(metric.key, -1)]
        while self._metrics:
            batch = self._metrics[:METRICS_PER_BATCH]
            self._attempt(lambda: client.log_batch(run_id, metrics=batch), f"{len(batch)} metrics")  # noqa: B023 - called at once
            del self._metrics[: len(batch)]
            self._late += len(batch) if self._away_since else 0

    def _deliver_waiting(self, client: MlflowClient, run_id: str) -> None:
        while self._waiting:
            what, about = self._waiting[0]
            self._attempt(lambda: DELIVER[what](client, run_id, **about), f"a {what}")  # noqa: B023 - called at once
            self._waiting.pop(0)
            self._late += 1 if self._away_since else 0

    def _attempt(self, call: Callable[[], object], what: str) -> None:
        """Do it; what the store refuses for good is dropped with a warning, or it would block all that waits behind it."""
        try:
            call()
        except (MlflowException, FileNotFoundError, ValueError, TypeError) as error:
            if isinstance(error, MlflowException) and error.get_http_status_code() != 400:
                raise  # away, busy, or not logged in at the moment
            log.warning("node %s: MLflow refused %s and they are dropped: %s", self.name, what, cleaned(str(error)))

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


def _last_steps(client: MlflowClient, run: Run) -> dict[str, int]:
    return {key: max(metric.step for metric in client.get_metric_history(run.info.run_id, key)) for key in run.data.metrics}


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


def _log_image(client: MlflowClient, run_id: str, key: str, content: bytes, step: int) -> None:
    start = f"images/{re.sub('/', '~', key)}+step+{step}+"  # how MLflow names them
    if not any(entry.path.startswith(start) for entry in client.list_artifacts(run_id, "images")):
        client.log_image(run_id, Image.open(io.BytesIO(content)), key=key, step=step)


def _log_file(client: MlflowClient, run_id: str, path: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / Path(path).name
        file.write_bytes(content)
        client.log_artifact(run_id, str(file), None if Path(path).parent == Path() else Path(path).parent.as_posix())


def _log_table(client: MlflowClient, run_id: str, file: str, text: str) -> None:
    folder = str(Path(file).parent)
    if any(entry.path == file for entry in client.list_artifacts(run_id, None if folder == "." else folder)):
        client.log_text(run_id, text, file)  # log_table would append
    else:
        client.log_table(run_id, pd.DataFrame(**json.loads(text)), file)


def _log_dataset(client: MlflowClient, run_id: str, dataset: dict[str, str], context: str) -> None:
    client.log_inputs(run_id, datasets=[DatasetInput(Dataset(**dataset), [InputTag("mlflow.data.context", context)])])


DELIVER: dict[str, Callable[..., object]] = {
    "params": _log_params,
    "image": _log_image,
    "table": _log_table,
    "dataset": _log_dataset,
    "file": _log_file,
    "tag": lambda client, run_id, key, value: client.set_tag(run_id, key, value),
}
"""What tells MLflow of a ``Record``, by what it is."""


# --------------------------------------------------------------------------------------------------------- after an outage


def settle(tracked: TrackedRun) -> list[str]:
    """Deliver what nodes that have ended had to keep. A sentence for every node to which MLflow was away, for the report.

    One caller at a time, or metrics could be delivered twice: the tasks before the first node of a run and after its last.
    """
    try:
        for name in waiting.nodes(tracked.folder):
            kept = waiting.read(tracked.folder, name)
            Node.taken_up(tracked, name).close("FAILED" if kept and kept.status == "FAILED" else "FINISHED")
        still = [kept for name in waiting.nodes(tracked.folder) if (kept := waiting.read(tracked.folder, name))]
    except Exception as error:  # as for a node
        return [f"what waits for MLflow in {tracked.folder} cannot be read: {error}"]
    return [*_outages(tracked), *(_not_delivered(tracked, kept) for kept in still)]


def _outages(tracked: TrackedRun) -> list[str]:
    try:
        client = connect(tracked.tracking_uri)
        children = client.search_runs([tracked.experiment_id], f"tags.`{PARENT}` = '{tracked.run_id}'")
    except Exception as error:  # as for a node
        return [f"MLflow cannot be asked which records came late: {cleaned(str(error))}"]
    outages = [(child.data.tags[NODE], json.loads(child.data.tags[AWAY])) for child in children if AWAY in child.data.tags]
    return [_late(node, **outage) for node, outage in sorted(outages, key=lambda outage: outage[0])]


def _late(node: str, seconds: float, late: int, lost: int) -> str:
    rest = f"; {lost} metrics were too many to keep and are lost" if lost else ""
    return f"{node}: MLflow was away for {seconds:g} s; {late} records were delivered late{rest}"


def _not_delivered(tracked: TrackedRun, kept: Waiting) -> str:
    count = len(kept.metrics) + len(kept.records)
    return f"{kept.node}: MLflow is away; {count} records wait in {tracked.folder}/{waiting.FOLDER} for the next start of the run"
