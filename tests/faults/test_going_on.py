"""Which run a second start goes on with, and that two never work in one folder."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from ebbflow.storage import identity
from ebbflow.storage.locks import FolderInUseError, lock_folder
from ebbflow.tracking.child_run import open_node_run
from ebbflow.tracking.parent_run import finish_run, log_results
from ebbflow.tracking.store import connect_to_store
from tasks.cache import LOCAL_CACHE
from tasks.start_run import start_run
from tasks.types import BaseModelArtifact
from tests.forked import separate_fork_server
from tests.storage.lock_cases import locked_elsewhere


@pytest.fixture(autouse=True)
def ends_its_fork_server() -> Iterator[None]:
    """``start_run`` prepares the process group of the recipe's offline stage."""
    with separate_fork_server():
        yield


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all tests, which tell their runs apart by the recipe's name."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def make(output: Path, request: pytest.FixtureRequest) -> Callable[..., Recipe]:
    name = request.node.originalname.replace("_", "-")
    return lambda **changes: Recipe.model_validate({"name": name, "output": str(output)} | changes)


def test_a_run_that_was_killed_is_resumed(
    make: Callable[..., Recipe], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stopped = start_run(recipe=make())
    assert "resuming" not in caplog.text
    assert start_run(recipe=make()) == stopped
    assert (
        f"resuming the stopped run (MLflow run {stopped.run_id}); to start over, delete"
        f" {stopped.folder}" in caplog.text
    )


@pytest.mark.parametrize("here", [True, False])
def test_a_run_that_was_killed_before_it_had_a_folder(
    make: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    stopped = start_run(recipe=make(seed=int(here)))
    shutil.rmtree(stopped.folder)
    if not here:
        monkeypatch.setattr("platform.node", lambda: "another machine")
    assert (start_run(recipe=make(seed=int(here))).run_id == stopped.run_id) is here


def test_a_run_that_failed_goes_on(make: Callable[..., Recipe]) -> None:
    failed = start_run(recipe=make())
    with pytest.raises(RuntimeError, match="disk"), open_node_run(failed, "prompts"):
        raise RuntimeError("disk")
    client = connect_to_store(failed.tracking_uri)
    assert client.get_run(failed.run_id).info.status == "FAILED"
    assert start_run(recipe=make()) == failed
    assert client.get_run(failed.run_id).info.status == "RUNNING"


def test_a_run_that_waits_for_a_person_goes_on(make: Callable[..., Recipe]) -> None:
    waiting = start_run(recipe=make())
    log_results(waiting, [], finish=False)
    assert start_run(recipe=make()) == waiting


def _finish(run: TrackedRun) -> None:
    finish_run(run, "FINISHED")


def _delete_folder(run: TrackedRun) -> None:
    with open_node_run(run, "prompts"):
        pass
    shutil.rmtree(run.folder)


def _delete_run(run: TrackedRun) -> None:
    connect_to_store(run.tracking_uri).delete_run(run.run_id)


@pytest.mark.parametrize("end", [_finish, _delete_folder, _delete_run])
def test_a_run_that_is_over_does_not_go_on(
    make: Callable[..., Recipe], end: Callable[[TrackedRun], None]
) -> None:
    before = start_run(recipe=make(seed=len(end.__name__)))
    end(before)
    after = start_run(recipe=make(seed=len(end.__name__)))
    assert after.run_id != before.run_id
    assert after.folder != before.folder


def test_another_recipe_begins_anew(make: Callable[..., Recipe]) -> None:
    assert start_run(recipe=make()).run_id != start_run(recipe=make(seed=1)).run_id


def test_changed_code_begins_anew(
    make: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = start_run(recipe=make())
    monkeypatch.setattr(identity, "compute_code_digest", lambda *places: "changed")
    assert start_run(recipe=make()).run_id != before.run_id


def test_changed_prompts_begin_anew(make: Callable[..., Recipe], tmp_path: Path) -> None:
    source = tmp_path / "prompts.txt"
    source.write_text('"ONE"\n"TWO"\n"SIX"\n"TEN"\n')
    few = {"source": str(source), "validation": 1, "held_out": 2}
    recipe = make(prompts=few, stages=[{"kind": "online", "prompts_per_step": 1}])
    before = start_run(recipe=recipe)
    assert start_run(recipe=recipe) == before
    source.write_text('"ONE"\n"TWA"\n"SIX"\n"TEN"\n')
    assert start_run(recipe=recipe).run_id != before.run_id


def test_a_second_start_is_refused_while_the_first_lives(make: Callable[..., Recipe]) -> None:
    run = start_run(recipe=make())
    with (
        pytest.raises(
            FolderInUseError,
            match=f"{run.folder} is in use by process {os.getpid()} on .*; wait until",
        ),
        lock_folder(Path(run.folder)),
    ):
        pass
    start_run(recipe=make(seed=1))  # this process turns to another run
    first = locked_elsewhere(run.folder)
    try:
        with pytest.raises(
            FolderInUseError, match=rf"is in use by process {first.pid} on .*another 'output'"
        ):
            start_run(recipe=make())
    finally:
        first.kill()
        first.communicate()
    assert start_run(recipe=make()) == run


def test_a_base_model_that_flytes_cache_outlived(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    context = FlyteContextManager.current_context()
    kept = BaseModelArtifact(folder=FlyteDirectory(str(folder)), seconds=1.0, finished_at=2.0)
    literal = TypeEngine.to_literal(
        context, kept, BaseModelArtifact, TypeEngine.to_literal_type(BaseModelArtifact)
    )
    found = TypeEngine.to_python_value(context, literal, BaseModelArtifact)
    shutil.rmtree(found.folder.path)
    with pytest.raises(
        ValueError, match=rf"{found.folder.path} is gone, .*delete {LOCAL_CACHE} and start again"
    ):
        TypeEngine.to_python_value(context, literal, BaseModelArtifact)
