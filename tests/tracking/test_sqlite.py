"""A SQLite store is made whole or not at all, and one that is not whole is named."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from ebbflow.recipe import Recipe
from ebbflow.storage.disk import DiskFullError
from ebbflow.tracking import empty_store
from ebbflow.tracking.child_run import open_node_run
from ebbflow.tracking.parent_run import start_run
from ebbflow.tracking.store import TrackingError, connect_to_store
from tests.forked import CONTEXT

STATEMENTS = (1, 60, 200, 400)
"""After how many of MLflow's statements a process dies; it sends about 440 to make a store."""


@contextmanager
def at_each_statement(call: Callable[[Any], object]) -> Iterator[None]:
    """In the block ``call(cursor)`` runs before each statement that SQLAlchemy sends."""

    def before(connection: Any, cursor: Any, *_: object) -> None:
        call(cursor)

    event.listen(Engine, "before_cursor_execute", before)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", before)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache without an empty store, so that MLflow makes its tables here."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(empty_store, "cache_folder", lambda: folder / "ebbflow" / "stores")
    return folder


def start_and_die(output: str, cache: str, statements: int) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    left = iter(range(statements))

    def count(_: object) -> None:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    with at_each_statement(count):
        start_run(Recipe(output=output), None)


def in_processes(count: int, work: Callable[..., object], *arguments: object) -> list[int | None]:
    """Exit codes of as many processes that do the work at the same time."""
    processes = [CONTEXT.Process(target=work, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def start_when_all_do(output: str, cache: str, barrier: Any) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    barrier.wait()
    start_run(Recipe(output=output), None)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".mlflow.db.lock"}


def number_of_runs(output: Path) -> int:
    with closing(sqlite3.connect(output / "mlflow.db")) as database:
        return database.execute("SELECT count(*) FROM runs").fetchone()[0]


def test_a_first_start_that_is_killed_leaves_no_store_and_the_next_makes_it(
    tmp_path: Path, cache: Path
) -> None:
    for statements in STATEMENTS:
        died = in_processes(1, start_and_die, str(tmp_path), str(cache), statements)
        assert died == [-signal.SIGKILL]
        assert not (tmp_path / "mlflow.db").exists()
    start_run(Recipe(output=str(tmp_path)), None)
    assert number_of_runs(tmp_path) == 1
    assert files(tmp_path) == {"mlflow.db", "mlartifacts"}, (
        "no journal, and nothing of the killed ones"
    )


def test_two_first_starts_at_once_make_one_store(tmp_path: Path, cache: Path) -> None:
    barrier = CONTEXT.Barrier(2)
    assert in_processes(2, start_when_all_do, str(tmp_path), str(cache), barrier) == [0, 0]
    assert number_of_runs(tmp_path) == 2


@pytest.mark.exhaustive
def test_a_full_disk_leaves_no_store(tmp_path: Path) -> None:
    def fill(cursor: Any) -> None:
        cursor.connection.execute("PRAGMA max_page_count = 20").close()

    with (
        at_each_statement(fill),
        pytest.raises(
            DiskFullError, match=rf"{tmp_path}/mlflow\.db could not be written.*free space"
        ),
    ):
        start_run(Recipe(output=str(tmp_path)), None)
    assert files(tmp_path) == set()
    start_run(Recipe(output=str(tmp_path)), None)
    assert number_of_runs(tmp_path) == 1


def test_an_error_while_it_is_made_leaves_no_store(tmp_path: Path) -> None:
    def fail(_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with (
        at_each_statement(fail),
        pytest.raises(TrackingError, match=r"cannot write the MLflow store .*disk I/O error"),
    ):
        connect_to_store(f"sqlite:///{tmp_path}/mlflow.db")
    assert files(tmp_path) == set()


def test_an_empty_file_becomes_a_store_and_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "real.db").touch()
    (tmp_path / "mlflow.db").symlink_to(tmp_path / "elsewhere" / "real.db")
    start_run(Recipe(output=str(tmp_path)), None)
    assert (tmp_path / "mlflow.db").is_symlink()
    assert number_of_runs(tmp_path) == 1


def test_a_folder_with_an_odd_name(tmp_path: Path) -> None:
    output = tmp_path / "\u00a0ü #@:;&=+{x}' 100%"
    tracked = start_run(Recipe(output=str(output)), None)
    with open_node_run(tracked, "prompts") as run_logger:
        run_logger.log_file("a/b.txt", b"content")
    assert {path.name for path in tmp_path.iterdir()} == {output.name}
    assert files(output) == {"mlflow.db", "mlartifacts"}
    assert [path.read_bytes() for path in output.rglob("b.txt")] == [b"content"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("DROP TABLE tags", "1 of its tables are missing, such as 'tags'"),
        ("UPDATE alembic_version SET version_num = '451aebb31d03'", "out-of-date database schema"),
    ],
)
def test_a_store_that_is_not_whole_is_named_and_stays_as_it_is(
    store: Path, tmp_path: Path, damage: str, said: str
) -> None:
    copy = tmp_path / "mlflow.db"
    with (
        closing(sqlite3.connect(store / "mlflow.db")) as whole,
        closing(sqlite3.connect(copy)) as broken,
    ):
        whole.backup(broken)
        broken.execute(damage)
        broken.commit()
    before = copy.read_bytes()
    with pytest.raises(
        TrackingError,
        match=rf"{copy} is not a whole store.*{said}.*mlflow db upgrade sqlite:///{copy}.*move the",
    ):
        start_run(Recipe(output=str(tmp_path)), None)
    assert copy.read_bytes() == before


def make_store(folder: Path) -> tuple[int, set[tuple[str, str]]]:
    """Make a store; return the number of statements that SQLAlchemy sent and the store's schema."""
    sent: list[object] = []
    with at_each_statement(sent.append):
        connect_to_store(f"sqlite:///{folder}/mlflow.db")
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        schema = set(database.execute("SELECT name, sql FROM sqlite_master"))
    return len(sent), schema


def test_later_stores_are_copies_of_an_empty_one_with_artifacts_of_their_own(
    tmp_path: Path,
) -> None:
    migrated, schema = make_store(tmp_path / "first")
    start_run(Recipe(output=str(tmp_path / "first")), None)
    copied, copied_schema = make_store(tmp_path / "second")
    assert migrated > max(STATEMENTS)
    assert copied < min(STATEMENTS[1:])
    assert copied_schema == schema
    assert number_of_runs(tmp_path / "second") == 0
    for folder in (tmp_path / "first", tmp_path / "second"):
        client = connect_to_store(f"sqlite:///{folder}/mlflow.db")
        assert client.get_experiment("0").artifact_location == (folder / "mlartifacts/0").as_uri()
    copy = (empty_store._find_folder() / "mlflow.db").read_bytes()
    assert str(tmp_path).encode() not in copy


def test_a_damaged_empty_store_is_made_anew(tmp_path: Path) -> None:
    migrated, _ = make_store(tmp_path / "first")
    copy = empty_store._find_folder() / "mlflow.db"
    copy.write_bytes(copy.read_bytes()[:-4096])
    statements, schema = make_store(tmp_path / "second")
    assert statements == migrated
    statements, copied_schema = make_store(tmp_path / "third")
    assert statements < migrated
    assert copied_schema == schema


def test_a_cache_that_cannot_be_written_costs_the_migrations_alone(
    tmp_path: Path, cache: Path
) -> None:
    (cache / "ebbflow").touch()
    for name in ("first", "second"):
        statements, _ = make_store(tmp_path / name)
        assert statements > max(STATEMENTS)
        start_run(Recipe(output=str(tmp_path / name)), None)
        assert number_of_runs(tmp_path / name) == 1
