"""MLflow runs: one parent per execution, one child per node, both found by tags and resumed when a task is retried.

What costs nothing to lose must never stop what costs GPU hours: a node's metrics, pictures and tables wait in memory while the
store is away and are delivered at a later flush. The parent run is different: it is opened before any work, so a store that is
down is an error there. Everything goes through ``MlflowClient``; MLflow's process-wide "active run" is never touched.
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
from urllib.parse import urlsplit

import pandas as pd
import pyarrow as pa
import pyarrow.types as pt
import yaml
from mlflow import MlflowClient
from mlflow.data.pandas_dataset import from_pandas
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run
from mlflow.exceptions import MlflowException
from PIL import Image

from ebbflow.recipe import Recipe
from ebbflow.records import Evaluation, TrackedRun

EXECUTION, NODE, PARENT = "flyte.execution_id", "ebbflow.node", "mlflow.parentRunId"
ROLE, DIGEST = "ebbflow.role", "ebbflow.recipe_digest"
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
            f"the MLflow store {_without_password(uri)} does not answer: {_without_password(cause, uri)}. "
            "Start it, correct tracking.uri or MLFLOW_TRACKING_URI, or leave both out to track in a SQLite file in 'output'"
        ) from error


def _without_password(text: str, uri: str | None = None) -> str:
    """A text, or the URI itself, without the password of the URI."""
    password = urlsplit(uri or text).password
    return text.replace(f":{password}@", ":***@") if password else text


# ----------------------------------------------------------------------------------------------------------- the parent run


def start_run(recipe: Recipe, execution_id: str | None) -> TrackedRun:
    """Open the parent run of an execution, or find it again when the execution is retried.

    Args:
        recipe: logged as parameters and as recipe.yaml.
        execution_id: what identifies the execution across retries; None (a run without an orchestrator) always opens a new run.

    Raises:
        TrackingError: the store cannot be used, or the execution was already tracked with another recipe.
    """
    uri = resolve_tracking_uri(recipe)
    check_store(uri)
    client = connect(uri)
    experiment_id = _experiment(client, recipe, uri)
    run = _find(client, experiment_id, {ROLE: "execution", EXECUTION: execution_id}) if execution_id else None
    if run is None:
        run = client.create_run(experiment_id, tags=_parent_tags(recipe, execution_id), run_name=recipe.name)
    elif run.data.tags.get(DIGEST) != recipe.digest:
        raise TrackingError(
            f"execution {execution_id} is run {run.info.run_id} of recipe {run.data.tags.get(DIGEST, 'unknown')[:12]} "
            f"and now comes with {recipe.digest[:12]}; a changed recipe needs a new execution"
        )
    run_id = run.info.run_id
    client.update_run(run_id, status="RUNNING")
    _log_params(client, run_id, flatten(recipe.model_dump(mode="json")))
    client.log_text(run_id, yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False), "recipe.yaml")
    return TrackedRun(
        run_id=run_id,
        experiment_id=experiment_id,
        tracking_uri=uri,
        folder=_folder(recipe.output, f"{recipe.name}-{run_id[:8]}"),
        recipe_digest=recipe.digest,
        started_at=run.info.start_time / 1000,
    )


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
        log.warning("run %s could not be closed in MLflow: %s", run_id, error)


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
            f"experiment {name!r} was deleted in {_without_password(uri)}; restore it with "
            "`mlflow experiments restore`, or set tracking.experiment to another name"
        )
    return experiment.experiment_id


def _parent_tags(recipe: Recipe, execution_id: str | None) -> dict[str, str]:
    stages = " → ".join(f"{stage.kind} {stage.algorithm.name}" for stage in recipe.stages)
    note = f"Recipe **{recipe.name}**, seed {recipe.seed}: {recipe.rounds} × ({stages}), {recipe.policy.train} training."
    execution = {EXECUTION: execution_id} if execution_id else {}
    return {ROLE: "execution", DIGEST: recipe.digest, "mlflow.note.content": note, **execution}


def _find(client: MlflowClient, experiment_id: str, tags: Mapping[str, str | None]) -> Run | None:
    """The oldest run with these tags: two racing attempts then agree on one."""
    condition = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
    found = client.search_runs([experiment_id], condition, max_results=1, order_by=["attributes.start_time ASC"])
    return found[0] if found else None


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
    """The child run of one node, resumed when the node is retried.

    It ends FINISHED when the body ends, FAILED when the body raises, and then takes the parent with it until the retry. A
    process that is killed leaves it RUNNING; the retry resumes it.

    Args:
        node: unique in the execution, the same on every retry: ``1.2 offline training``, ``1.2 offline rollout 0`` ...
    """
    recorder = Node(tracked, node)
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
    the last step that the run already holds for a key are skipped, because MLflow would append them a second time.
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
        self._metrics: list[Metric] = []
        self._waiting: list[Callable[[MlflowClient, str], object]] = []
        self._flush_at = FLUSH_AT
        self._away = False

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """Keep one value per metric for an absolute step; delivered in batches."""
        now = int(time.time() * 1000)
        for key, value in values.items():
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
        self._send(lambda client, run_id: _log_params(client, run_id, flatten(params)))

    def log_image(self, key: str, image: Image.Image | bytes, step: int) -> None:
        """A picture (PIL, or encoded) that the UI shows by key and step; one that a resumed run already holds is skipped."""
        picture = Image.open(io.BytesIO(image)) if isinstance(image, bytes) else image
        self._send(lambda client, run_id: _log_image(client, run_id, key, picture, step))

    def log_table(self, name: str, table: pa.Table) -> None:
        """A table without its binary columns, as ``<name>.json`` for the UI's table view; a retry replaces it."""
        frame = _without_binary(table).to_pandas()
        self._send(lambda client, run_id: _log_table(client, run_id, frame, f"{name}.json"))

    def log_dataset(self, name: str, table: pa.Table, context: str, source: str) -> None:
        """Name, digest and schema of a table that this node reads, without its binary columns.

        Args:
            context: what it is used for: ``training``, ``evaluation`` ...
            source: where it is stored: a path or a URI.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Hint: Inferred schema")  # prompt ids are integers, on purpose
            dataset = from_pandas(_without_binary(table).to_pandas(), source=source, name=name).to_dict()
        entry = DatasetInput(Dataset(**dataset), [InputTag("mlflow.data.context", context)])
        self._send(lambda client, run_id: client.log_inputs(run_id, datasets=[entry]))

    def log_artifact(self, path: str | Path, folder: str | None = None) -> None:
        """A file, under ``folder`` of the run's artifacts."""
        file = _existing(path)
        self._send(lambda client, run_id: client.log_artifact(run_id, file, folder))

    def log_file(self, path: str, content: bytes) -> None:
        """A file at ``path`` of the run's artifacts; a retry replaces it."""
        self._send(lambda client, run_id: _log_file(client, run_id, Path(path), content))

    def flush(self) -> bool:
        """Deliver what waits; call it at checkpoints. Returns whether all of it arrived."""
        try:
            client, run_id = self._open()
            self._deliver_metrics(client, run_id)
            self._deliver_waiting(client, run_id)
        except Exception as error:  # a transport raises anything, and none of it may stop the training
            self._postpone(error)
            return False
        if self._away:
            log.warning("node %s: the MLflow store is back, everything was delivered", self.name)
        self._away, self._flush_at = False, FLUSH_AT
        return True

    def close(self, status: Literal["FINISHED", "FAILED"]) -> None:
        """Deliver the rest and end the run."""
        if self.non_finite:
            tag = json.dumps(dict(self.non_finite))
            self._waiting.append(lambda client, run_id: client.set_tag(run_id, "ebbflow.non_finite_metrics", tag))
        self._waiting.append(lambda client, run_id: client.set_terminated(run_id, status))
        if status == "FAILED":
            self._waiting.append(lambda client, run_id: client.set_terminated(self._tracked.run_id, status))
        delivered = self.flush()
        if self.dropped or not delivered:
            log.warning(
                "node %s ended while the MLflow store was away: %d metrics and %d other records are lost",
                *(self.name, self.dropped + len(self._metrics), len(self._waiting)),
            )

    def _send(self, action: Callable[[MlflowClient, str], object]) -> None:
        self._waiting.append(action)
        if not self._away:  # else it waits for the next flush: every failing call costs seconds of training
            self.flush()

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

    def _deliver_waiting(self, client: MlflowClient, run_id: str) -> None:
        while self._waiting:
            action = self._waiting[0]
            self._attempt(lambda: action(client, run_id), "a record")  # noqa: B023 - called at once
            self._waiting.pop(0)

    def _attempt(self, call: Callable[[], object], what: str) -> None:
        """Do it; what the store refuses for good is dropped with a warning, or it would block all that waits behind it."""
        try:
            call()
        except (MlflowException, FileNotFoundError, ValueError, TypeError) as error:
            if isinstance(error, MlflowException) and error.get_http_status_code() != 400:
                raise  # away, busy, or not logged in at the moment
            log.warning("node %s: MLflow refused %s and they are dropped: %s", self.name, what, error)

    def _postpone(self, error: Exception) -> None:
        if not self._away:
            store = _without_password(self._tracked.tracking_uri)
            log.warning("node %s: the MLflow store %s is away; records wait in memory: %s", self.name, store, error)
        self._away = True
        # Attempts get rarer as the buffer fills, so that a store which is away for hours costs a few timeouts and not thousands.
        self._flush_at = max(2 * len(self._metrics), FLUSH_AT)

    def _count_non_finite(self, key: str, value: float, step: int) -> None:
        if not self.non_finite[key]:
            log.warning("node %s: metric %s is %s at step %d; it is counted and not sent", self.name, key, value, step)
        self.non_finite[key] += 1


def _last_steps(client: MlflowClient, run: Run) -> dict[str, int]:
    return {key: max(metric.step for metric in client.get_metric_history(run.info.run_id, key)) for key in run.data.metrics}


def _existing(path: str | Path) -> str:
    if not Path(path).exists():
        raise FileNotFoundError(f"no file or folder at {path} to log as an artifact")
    return str(path)


def _without_binary(table: pa.Table) -> pa.Table:
    """Pictures and latents do not belong into tables that a browser loads."""
    kept = [field.name for field in table.schema if not _is_bulky(field.type)]
    return table.select(kept)


def _is_bulky(kind: pa.DataType) -> bool:
    binary = pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_fixed_size_binary(kind)
    return binary or isinstance(kind, pa.BaseExtensionType)


def _log_image(client: MlflowClient, run_id: str, key: str, picture: Image.Image, step: int) -> None:
    start = f"images/{re.sub('/', '~', key)}+step+{step}+"  # how MLflow names them
    if not any(entry.path.startswith(start) for entry in client.list_artifacts(run_id, "images")):
        client.log_image(run_id, picture, key=key, step=step)


def _log_file(client: MlflowClient, run_id: str, path: Path, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / path.name
        file.write_bytes(content)
        client.log_artifact(run_id, str(file), None if path.parent == Path() else path.parent.as_posix())


def _log_table(client: MlflowClient, run_id: str, frame: pd.DataFrame, file: str) -> None:
    folder = str(Path(file).parent)
    if any(entry.path == file for entry in client.list_artifacts(run_id, None if folder == "." else folder)):
        client.log_text(run_id, frame.to_json(orient="split", index=False), file)  # log_table would append
    else:
        client.log_table(run_id, frame, file)
