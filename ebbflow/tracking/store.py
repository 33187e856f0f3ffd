"""The MLflow store: which one a recipe uses, whether it works, and how runs are found and created in it.

Everything goes through ``MlflowClient``; MLflow's process-wide "active run" is never touched.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

from mlflow import MlflowClient
from mlflow.entities import Run

from ebbflow.recipe import Recipe
from ebbflow.recipe.secrets import redact

EXECUTION, NODE, PARENT = "flyte.execution_id", "ebbflow.node", "mlflow.parentRunId"
ROLE, DIGEST, RUN = "ebbflow.role", "ebbflow.recipe_digest", "ebbflow.run_id"
AWAY, REFUSED = "ebbflow.mlflow_away", "ebbflow.refused"
"""Tags: what runs are found by; how long MLflow was away from a run, and what it refused."""
UPLOAD_TIMEOUT = 3600
"""Seconds for a request that uploads weights."""


class TrackingError(RuntimeError):
    """The tracking store cannot be used: names the store, the cause and the fix."""


def resolve_tracking_uri(recipe: Recipe) -> str:
    """The recipe's store, else ``MLFLOW_TRACKING_URI``, else a SQLite file in the output folder.

    Raises:
        TrackingError: the URI contains a password or a token, which would leak; or there is none and ``output`` is not local.
    """
    if uri := recipe.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI"):
        if redact(uri) != uri:
            raise TrackingError(
                f"tracking URI {redact(uri)} contains a password or a token, which would leak into logs and reports; set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN, or what the database's driver "
                "reads, such as PGPASSWORD"
            )
        return uri
    if "://" in recipe.output:
        raise TrackingError(
            f"output {recipe.output} is no local folder, so it cannot hold a SQLite store; set tracking.uri or "
            "MLFLOW_TRACKING_URI to an MLflow server"
        )
    return f"sqlite:///{Path(recipe.output).absolute() / 'mlflow.db'}"


def connect(uri: str) -> MlflowClient:
    """A client with bounded requests: by default one call to a silent server blocks for minutes."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] = "false"  # loading a pickle executes it
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


@contextmanager
def uploading() -> Iterator[None]:
    """Allow an hour per request of a client (``connect``): a server answers an upload only once it has stored the file."""
    name, usual = "MLFLOW_HTTP_REQUEST_TIMEOUT", os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]
    os.environ[name] = str(max(UPLOAD_TIMEOUT, int(usual)))
    try:
        yield
    finally:
        os.environ[name] = usual


def check_store(uri: str) -> None:
    """Fail within seconds if the store cannot be used.

    Raises:
        TrackingError: a SQLite file or its folder cannot be written, or a server does not answer.
    """
    if database := sqlite_file(uri):
        _check_sqlite(database, uri)
    else:
        _check_server(uri)


def sqlite_file(uri: str) -> Path | None:
    """The database file of a ``sqlite:///`` URI; None for other stores."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def _check_sqlite(database: Path, uri: str) -> None:
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=database.parent):
            pass  # SQLite writes its journal next to the file, so the folder must be writable too
        if database.exists():
            with closing(sqlite3.connect(database, timeout=5, isolation_level=None)) as connection:
                # reads the header and takes the write lock, so anything unwritable fails here
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
    except (OSError, sqlite3.Error) as error:
        raise TrackingError(
            f"cannot write the MLflow store {uri}: {error}. Set 'output' to a writable folder, or tracking.uri or "
            "MLFLOW_TRACKING_URI to another store"
        ) from error


def _check_server(uri: str) -> None:
    try:
        connect(uri).search_experiments(max_results=1)
    except Exception as error:  # of requests, sqlalchemy or MLflow, depending on the store
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TrackingError(
            f"the MLflow store {redact(uri)} does not answer: {redact(cause)}. Start it, or correct tracking.uri or "
            "MLFLOW_TRACKING_URI; without either, a SQLite file in 'output' is used"
        ) from error


def find(
    client: MlflowClient, experiment_id: str, tags: Mapping[str, str | None], order: Literal["ASC", "DESC"] = "ASC"
) -> Run | None:
    """The oldest run with these tags, so that racing attempts agree on it; with ``DESC`` the newest."""
    condition = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
    found = client.search_runs([experiment_id], condition, max_results=1, order_by=[f"attributes.start_time {order}"])
    return found[0] if found else None


def create_run(client: MlflowClient, experiment_id: str, identity: Mapping[str, str], tags: Mapping[str, str], name: str) -> Run:
    """A new run with these tags, or an older one with the tags of ``identity`` if there is one after all.

    Attempts may race, and after a lost answer MLflow's client repeats its request: then an older run exists that nobody knows.
    """
    created = client.create_run(experiment_id, tags={**identity, **tags}, run_name=name)
    oldest = (find(client, experiment_id, identity) if identity else None) or created
    if oldest.info.run_id != created.info.run_id:
        client.delete_run(created.info.run_id)
    return oldest


def last_steps(client: MlflowClient, run: Run) -> dict[str, int]:
    """The last step that the run holds of each metric."""
    return {key: max(metric.step for metric in client.get_metric_history(run.info.run_id, key)) for key in run.data.metrics}
