"""The MLflow store: which one a recipe uses, whether it works, and how runs are found and created
in it.

Everything goes through ``MlflowClient``; MLflow's process-wide "active run" is never touched.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ebbflow.recipe import Recipe
from ebbflow.recipe.base import sanitize_text
from ebbflow.recipe.paths import check_store_uri
from ebbflow.recipe.secrets import redact_secrets
from ebbflow.storage.disk import DiskFullError, atomic_write, sync_path
from ebbflow.storage.locks import wait_for_lock
from ebbflow.tracking.empty_store import copy_empty_store, keep_empty_store

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

EXECUTION = "flyte.execution_id"
NODE = "ebbflow.node"
PARENT = "mlflow.parentRunId"
MACHINE = "ebbflow.machine"
FOLDER = "ebbflow.folder"
ROLE = "ebbflow.role"
DIGEST = "ebbflow.recipe_digest"
RUN = "ebbflow.run_id"
AWAY = "ebbflow.mlflow_away"
REFUSED = "ebbflow.refused"
"""Tags: what runs are found by; how long MLflow was away from a run, and what it refused."""
ARTIFACTS = "mlartifacts"
"""The folder next to a SQLite store with the artifacts of its runs."""
UPLOAD_TIMEOUT = 3600
"""Seconds for a request that uploads weights."""


def read_execution_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """Read the name "project/domain/name" of Flyte's execution that this pod belongs to; None
    outside of pods.
    """
    parts = ("PROJECT", "DOMAIN", "ID")
    names = [environment.get(f"FLYTE_INTERNAL_EXECUTION_{part}", "") for part in parts]
    return "/".join(names) if all(names) else None


class TrackingError(RuntimeError):
    """The tracking store cannot be used: names the store, the cause and the fix."""


def resolve_tracking_uri(recipe: Recipe) -> str:
    """The recipe's store, else ``MLFLOW_TRACKING_URI``, else a SQLite file in the output folder.

    Raises:
        TrackingError: the URI contains a password or a token, which would leak, or is of no SQLite
            file; or there is none and ``output`` is not local.
    """
    uri = recipe.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if uri:
        # It is shown in logs, in the report and in the line of Python that loads a version, and it
        # is stored with the run.
        if redact_secrets(uri) != uri:
            raise TrackingError(
                f"tracking URI {redact_secrets(uri)} contains a password or a token, which would"
                " leak into logs and reports; set MLFLOW_TRACKING_USERNAME and"
                " MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN, or what the database's driver"
                " reads, such as PGPASSWORD"
            )
        return _check_usable(uri, "set tracking.uri or MLFLOW_TRACKING_URI to it")
    if "://" in recipe.output:
        raise TrackingError(
            f"output {recipe.output} is no local folder, so it cannot hold a SQLite store; set"
            " tracking.uri or MLFLOW_TRACKING_URI to an MLflow server"
        )
    return _check_usable(
        f"sqlite:///{Path(recipe.output).absolute() / 'mlflow.db'}",
        "or set 'output' to another folder",
    )


def _check_usable(uri: str, fix: str) -> str:
    try:
        return check_store_uri(uri)
    except ValueError as error:
        raise TrackingError(
            f"tracking URI {sanitize_text(uri)} cannot be used: {error}; {fix}"
        ) from None


def connect_to_store(uri: str) -> MlflowClient:
    """A client with bounded requests: by default one call to a silent server blocks for minutes.

    A SQLite store that does not exist is made first, which takes seconds.

    Raises:
        TrackingError: a SQLite file is not a whole MLflow store, or cannot be read or written.
        DiskFullError: no space was left to make it.
    """
    # Here, as a command that only names its store does without the seconds that MLflow takes.
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    # MLflow's client reads these from the environment at each request and has no arguments for
    # them. setdefault: what a user has set stays.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # two lines for every run that ends, nodes too; a run's own last lines have its address
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    # not setdefault: loading a pickle executes it, so no user may switch this on for us
    os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] = "false"
    database = find_sqlite_file(uri)
    if database:
        _ensure_sqlite(database, uri)
    try:
        return MlflowClient(tracking_uri=uri, registry_uri=uri)
    except MlflowException as error:
        if database:
            raise _build_not_whole_error(database, uri, take_first_line(error)) from error
        raise


@contextmanager
def allow_long_uploads() -> Iterator[None]:
    """Allow an hour per request of a client (``connect_to_store``): a server answers an upload only
    once it has stored the file.
    """
    name = "MLFLOW_HTTP_REQUEST_TIMEOUT"
    usual = os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]
    os.environ[name] = str(max(UPLOAD_TIMEOUT, int(usual)))
    try:
        yield
    finally:
        os.environ[name] = usual


def check_store(uri: str) -> None:
    """Fail within seconds if the store cannot be used.

    Raises:
        TrackingError: a SQLite file or its folder cannot be written, a server does not answer, or
            the driver of a database is not installed.
    """
    database = find_sqlite_file(uri)
    if database:
        _check_sqlite(database, uri)
    else:
        _check_server(uri)


def find_sqlite_file(uri: str) -> Path | None:
    """The database file of a ``sqlite:///`` URI; None for other stores."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def _check_sqlite(database: Path, uri: str) -> None:
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        # SQLite writes its journal next to the file, so the folder must be writable too
        with tempfile.TemporaryFile(dir=database.parent):
            pass
        if database.exists():
            # isolation_level=None: else Python's sqlite3 would begin a transaction of its own
            with closing(sqlite3.connect(database, timeout=5, isolation_level=None)) as connection:
                # reads the header and takes the write lock, so anything unwritable fails here
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
    except (OSError, sqlite3.Error) as error:
        raise _build_not_writable_error(uri, error) from error


def _ensure_sqlite(database: Path, uri: str) -> None:
    """Make the store unless its file has tables already.

    MLflow itself makes or completes the tables of the file it is given, in hundreds of statements
    that are not one transaction: where they stop half-way, or two processes send them at once, the
    file cannot be opened again.
    """
    file = Path(os.path.realpath(database))  # a link stays one
    try:
        tables = _read_table_names(file)
        if not tables:
            file.parent.mkdir(parents=True, exist_ok=True)
            with wait_for_lock(file.with_name(f".{file.name}.lock")):
                if not _read_table_names(file):  # nobody made it while this process waited
                    _make_sqlite(file)
            tables = _read_table_names(file)
    except DiskFullError:
        raise
    except Exception as error:  # of the file system, sqlite3, SQLAlchemy, alembic or MLflow
        raise _build_not_writable_error(uri, error) from error
    missing = sorted(_list_mlflow_tables() - tables)
    if missing:
        raise _build_not_whole_error(
            database, uri, f"{len(missing)} of its tables are missing, such as {missing[0]!r}"
        )


def _read_table_names(database: Path) -> set[str]:
    """The names of the tables in a SQLite file; none if there is no file."""
    if not database.exists():
        return set()
    # mode=rw: by default SQLite creates a file that is not there. 20 s: another process may be
    # writing.
    with closing(
        sqlite3.connect(f"{database.as_uri()}?mode=rw", uri=True, timeout=20)
    ) as connection:
        return {
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }


def _list_mlflow_tables() -> set[str]:
    """The names of the tables that MLflow looks for; it imports what registers them to open any
    SQLite store.
    """
    import mlflow.store.db.utils  # noqa: F401
    from mlflow.store.db.base_sql_model import Base

    return set(Base.metadata.tables)


def _make_sqlite(database: Path) -> None:
    """Let MLflow make its tables in another file, a copy of an empty store where there is one,
    which then replaces ``database``: a killed process leaves that as it was.
    """
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    def publish_store(folder: Path, path: Path) -> None:
        (new,) = folder.iterdir()  # a journal next to it would mean that it is not whole
        sync_path(new)
        new.replace(path)

    with (
        atomic_write(database, create=Path.mkdir, publish=publish_store) as folder,
        _disable_fsync(),
    ):
        uri = f"sqlite:///{folder / database.name}"
        is_copy = copy_empty_store(folder / database.name)
        try:
            SqlAlchemyStore(uri, (database.parent / ARTIFACTS).as_uri())
        # MLflow keeps an engine per URI for the life of the process. Its connections would stay
        # open on the file of the temporary folder, and a second attempt would get them.
        finally:
            engine = SqlAlchemyStore._engine_map.pop(uri, None)
            if engine:
                engine.dispose()
        if not is_copy:
            keep_empty_store(folder / database.name)


@contextmanager
def _disable_fsync() -> Iterator[None]:
    """Switch off SQLite's waits for the disk in new connections.

    Only for a file that has no name yet: hundreds of statements would each wait, seconds in all. If
    the machine loses power the file is lost, and nobody knew it.
    """
    from sqlalchemy import Engine, event

    def disable_synchronous(connection: sqlite3.Connection, record: object) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", disable_synchronous)
    try:
        yield
    finally:
        event.remove(Engine, "connect", disable_synchronous)


def _build_not_writable_error(uri: str, error: Exception) -> TrackingError:
    return TrackingError(
        f"cannot write the MLflow store {uri}: {take_first_line(error)}. Set 'output' to a"
        " writable folder, or tracking.uri or MLFLOW_TRACKING_URI to another store"
    )


def _build_not_whole_error(database: Path, uri: str, cause: str) -> TrackingError:
    return TrackingError(
        f"{database} is not a whole store of this MLflow: {cause}. If another version of MLflow"
        f" made it, copy it and run `mlflow db upgrade {uri}`. If a process was killed while it"
        " made or upgraded it, move the file away: the next start makes a new one"
    )


def take_first_line(error: Exception) -> str:
    """Return the first line of an error's text, and the start of one that is long: SQLAlchemy adds
    the statement and its parameters, a policy's metadata among them.
    """
    return sanitize_text((str(error).strip().splitlines() or [type(error).__name__])[0])


def _check_server(uri: str) -> None:
    try:
        connect_to_store(uri).search_experiments(max_results=1)
    except ModuleNotFoundError as error:
        raise TrackingError(
            f"the MLflow store {redact_secrets(uri)} needs the database driver {error.name}, which"
            " is not installed; run `pip install 'ebbflow[postgresql]'` for postgresql://, or set"
            " tracking.uri to an MLflow server"
        ) from error
    except Exception as error:  # of requests, sqlalchemy or MLflow, depending on the store
        raise TrackingError(
            f"the MLflow store {redact_secrets(uri)} does not answer:"
            f" {redact_secrets(take_first_line(error))}. Start it, or correct tracking.uri or"
            " MLFLOW_TRACKING_URI; without either, a SQLite file in 'output' is used"
        ) from error


def find_run(
    client: MlflowClient,
    experiment_id: str,
    tags: Mapping[str, str | None],
    order: Literal["ASC", "DESC"] = "ASC",
) -> Run | None:
    """The oldest run with these tags, so that racing attempts agree on it; with ``DESC`` the
    newest.
    """
    # backquotes: the keys have dots
    condition = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
    runs = client.search_runs(
        [experiment_id], condition, max_results=1, order_by=[f"attributes.start_time {order}"]
    )
    return runs[0] if runs else None


def create_run(
    client: MlflowClient,
    experiment_id: str,
    identity: Mapping[str, str],
    tags: Mapping[str, str],
    name: str,
) -> Run:
    """Create a run with these tags, or return an older one with the tags of ``identity`` if there
    is one after all.

    Attempts may race, and after a lost answer MLflow's client repeats its request: then an older
    run exists that nobody knows.

    Example:
        ::

            identity = {"mlflow.parentRunId": "0f3a…", "ebbflow.node": "1.1 online"}
            create_run(client, "1", identity, {"ebbflow.role": "node"}, name="1.1 online")
    """
    created = client.create_run(experiment_id, tags={**identity, **tags}, run_name=name)
    # MLflow cannot create a run only if there is none. All attempts look afterwards and agree on
    # the oldest; each deletes its own only, so that none deletes the one that another has chosen.
    # Without an identity (no orchestrator) nobody else looks for the run.
    oldest = (find_run(client, experiment_id, identity) if identity else None) or created
    if oldest.info.run_id != created.info.run_id:
        client.delete_run(created.info.run_id)
    return oldest
