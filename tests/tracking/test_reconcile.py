"""The status in MLflow of runs that ended without saying so."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from mlflow import MlflowClient

from ebbflow.cli import main
from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from ebbflow.storage.locks import LOCK, lock_folder
from ebbflow.tracking import reconcile
from ebbflow.tracking.parent_run import end_dead_runs, finish_run, open_run, start_run
from ebbflow.tracking.reconcile import ENDED_BY, Ending
from ebbflow.tracking.sender import open_child_run
from ebbflow.tracking.store import EXECUTION, connect_to_store, resolve_tracking_uri
from tasks import executions
from tasks.start_run import _end_dead_runs as end_dead_runs_before_this_one


@pytest.fixture
def recipe(store: Path) -> Recipe:
    """A recipe in an experiment of its own: the runs of other tests are not in it."""
    tracking = {"experiment": uuid.uuid4().hex}
    return Recipe.model_validate({"output": str(store), "tracking": tracking})


def _start(recipe: Recipe, execution: str | None = None) -> tuple[TrackedRun, MlflowClient]:
    tracked = start_run(recipe, execution)
    return tracked, connect_to_store(tracked.tracking_uri)


def _status(client: MlflowClient, run_id: str) -> str:
    return str(client.get_run(run_id).info.status)


def test_a_local_run_without_a_process_is_killed_with_its_nodes(recipe: Recipe) -> None:
    dead, client = _start(recipe)
    with lock_folder(Path(dead.folder)):
        node = open_child_run(dead, "1.1 online").run_id
        assert end_dead_runs(recipe) == [], "its process holds the lock"
    ((run, ending),) = end_dead_runs(recipe)
    assert run.info.run_id == dead.run_id
    assert ending.status == "KILLED"
    assert _status(client, dead.run_id) == _status(client, node) == "KILLED"
    assert client.get_run(dead.run_id).data.tags[ENDED_BY] == "its process is gone"
    assert end_dead_runs(recipe) == []


RUN_UNTIL_KILLED = """
import sys, time
from pathlib import Path
import yaml
from ebbflow.recipe import Recipe
from ebbflow.storage.locks import lock_folder
from ebbflow.tracking.parent_run import start_run
from ebbflow.tracking.sender import open_child_run

run = start_run(Recipe.model_validate(yaml.safe_load(sys.stdin.read())), None)
with lock_folder(Path(run.folder)):
    print(run.run_id, open_child_run(run, "1.1 online").run_id, flush=True)
    time.sleep(600)
"""


def test_the_next_run_ends_one_whose_process_was_killed(recipe: Recipe) -> None:
    keys = yaml.safe_dump(recipe.model_dump(mode="json", exclude_unset=True))
    with subprocess.Popen(
        [sys.executable, "-c", RUN_UNTIL_KILLED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(keys)
        process.stdin.close()
        run_id, node_id = process.stdout.readline().split()
        client = connect_to_store(resolve_tracking_uri(recipe))
        end_dead_runs_before_this_one(recipe)
        assert _status(client, run_id) == "RUNNING", "its process lives"
        process.kill()
        process.wait()
    end_dead_runs_before_this_one(recipe)
    assert _status(client, run_id) == _status(client, node_id) == "KILLED"


def test_a_run_that_starts_has_no_folder_yet(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, client = _start(recipe)
    assert not (Path(run.folder) / LOCK).exists()
    Path(recipe.output).mkdir(exist_ok=True)
    assert end_dead_runs(recipe) == []
    monkeypatch.setattr(time, "time", lambda: run.started_at + reconcile.START_SECONDS + 1)
    assert len(end_dead_runs(recipe)) == 1
    assert _status(client, run.run_id) == "KILLED"


def test_a_run_of_another_user_is_left_alone(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, _ = _start(recipe)
    with lock_folder(Path(theirs.folder)):
        pass

    @contextmanager
    def refuse(path: Path) -> Iterator[bool]:
        raise PermissionError(13, "Permission denied", str(path))
        yield

    monkeypatch.setattr(reconcile, "try_lock", refuse)
    assert end_dead_runs(recipe) == []


def test_a_container_does_not_end_the_run_of_another_one_of_its_machine(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both see the same path on disks of their own, and the same server."""
    run, client = _start(recipe)
    Path(recipe.output).mkdir(exist_ok=True)
    open_child_run(run, "1.1 online")
    monkeypatch.setattr(time, "time", lambda: run.started_at + reconcile.START_SECONDS + 1)
    monkeypatch.setattr(reconcile, "find_sqlite_file", lambda uri: None)
    assert end_dead_runs(recipe) == []
    assert _status(client, run.run_id) == "RUNNING"
    monkeypatch.undo()
    monkeypatch.setattr(time, "time", lambda: run.started_at + reconcile.START_SECONDS + 1)
    assert len(end_dead_runs(recipe)) == 1, "a store in a file is on the disk of the run"


@pytest.mark.parametrize("how", ["resumed", "finished"])
def test_a_run_that_goes_on_says_no_longer_how_it_ended(recipe: Recipe, how: str) -> None:
    run, client = _start(recipe)
    with lock_folder(Path(run.folder)):
        pass
    assert len(end_dead_runs(recipe)) == 1
    if how == "resumed":
        open_run(recipe, run)
    else:
        finish_run(run, "FINISHED")
    assert ENDED_BY not in client.get_run(run.run_id).data.tags


def test_a_run_of_another_machine_is_left_alone(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = _start(recipe)
    with lock_folder(Path(run.folder)):
        pass
    monkeypatch.setattr(reconcile.platform, "node", lambda: "elsewhere")
    assert end_dead_runs(recipe) == []


@pytest.mark.parametrize("status", ["KILLED", "FAILED", "FINISHED"])
def test_flyte_says_how_an_execution_ended(recipe: Recipe, status: reconcile.Status) -> None:
    name = f"p/d/{uuid.uuid4().hex[:8]}"
    run, client = _start(recipe, name)
    assert end_dead_runs(recipe) == [], "nobody asks Flyte"
    assert end_dead_runs(recipe, lambda execution: None) == [], "it runs"
    asked = []

    def ask(execution: str) -> Ending:
        asked.append(execution)
        return Ending(status, "Flyte: ABORTED")

    assert len(end_dead_runs(recipe, ask)) == 1
    assert asked == [name]
    assert _status(client, run.run_id) == status


def test_a_recovered_execution_takes_over_the_run(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, client = _start(recipe, "p/d/aborted")
    aborted = {"p/d/aborted": Ending("KILLED", "Flyte: ABORTED")}
    assert len(end_dead_runs(recipe, aborted.get)) == 1
    for name, value in (("PROJECT", "p"), ("DOMAIN", "d"), ("ID", "recovered")):
        monkeypatch.setenv(f"FLYTE_INTERNAL_EXECUTION_{name}", value)
    open_child_run(run, "1.1 online")
    assert _status(client, run.run_id) == "RUNNING"
    tags = client.get_run(run.run_id).data.tags
    assert tags[EXECUTION] == "p/d/recovered"
    assert ENDED_BY not in tags
    assert end_dead_runs(recipe, aborted.get) == [], "it is alive"


def test_a_run_that_has_ended_is_left_alone(recipe: Recipe) -> None:
    run, client = _start(recipe, f"p/d/{uuid.uuid4().hex[:8]}")
    finish_run(run, "FAILED")
    assert end_dead_runs(recipe, lambda execution: Ending("KILLED", "")) == []
    assert _status(client, run.run_id) == "FAILED"


def test_the_command_prints_what_it_sets_and_whom_it_could_not_ask(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"p/d/{uuid.uuid4().hex[:8]}" for _ in range(3)]
    runs = [_start(recipe, name)[0] for name in names]
    client = connect_to_store(runs[0].tracking_uri)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_unset=True)))
    asked = []

    def find_ending(execution: str) -> Ending | None:
        if execution not in names:
            return None  # of another test
        asked.append(execution)
        if len(asked) == 2:
            raise ConnectionError("no route to Flyte")
        return Ending("KILLED", "Flyte: ABORTED")

    monkeypatch.setattr(executions, "find_ending", find_ending)
    done = CliRunner().invoke(main, ["reconcile", "--recipe", str(file)])
    assert done.exit_code == 1
    assert "KILLED (Flyte: ABORTED)" in done.output
    assert "no route to Flyte" in done.output
    assert len(asked) == 2, "once is enough to know that Flyte does not answer"
    left_alone = done.output.partition("left alone")[2]
    assert sum(name in left_alone for name in names) == 2
    statuses = sorted(_status(client, run.run_id) for run in runs)
    assert statuses == ["KILLED", "RUNNING", "RUNNING"]
    monkeypatch.setattr(executions, "find_ending", lambda execution: Ending("KILLED", "end"))
    assert CliRunner().invoke(main, ["reconcile", "--recipe", str(file)]).exit_code == 0
    again = CliRunner().invoke(main, ["reconcile", "--recipe", str(file)])
    assert "no run to reconcile" in again.output
