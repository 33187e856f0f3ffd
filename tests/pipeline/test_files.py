"""Folders that tasks find by a path or a URI: the checkpoints of an earlier attempt, and what a
recipe names.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.stage import StageContext
from ebbflow.storage.disk import PathError, atomic_write, write_text
from tasks.files import (
    delete_checkpoints,
    fetch_artifact_once,
    fetch_folder,
    fetch_once_per_machine,
    make_node_output,
    open_checkpoints,
)


@pytest.fixture(params=["run", "#@:;&=+{x}' ü 100%", "at a URI"])
def local(request, tmp_path) -> Path:
    """The run's folder; odd names are names, too, except in URIs."""
    return tmp_path / request.param


@pytest.fixture
def run(request, local) -> TrackedRun:
    """A run in a folder, or at a URI that only Flyte's own store reaches."""
    folder = f"file://{local}" if local.name == "at a URI" else str(local)
    return TrackedRun(
        run_id="r",
        experiment_id="e",
        tracking_uri="",
        folder=folder,
        recipe_digest="d",
        started_at=0.0,
    )


@pytest.fixture
def ctx(make_recipe) -> StageContext:
    return StageContext(make_recipe(online={"checkpoints": {"every": 2}}), 0, 0)


def save(checkpoints, *steps):
    for step in steps:
        with checkpoints.save_step(step, {"done": step}) as folder:
            (folder / "part").write_text("weights")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_the_next_attempt_finds_what_the_last_one_saved(run, ctx, local):
    kept = local / "checkpoints" / "1.1-online"
    first = open_checkpoints(run, ctx)
    assert first.find_newest() is None
    save(first, 2, 4, 6)
    assert names(kept) == ["step-00004", "step-00006"]
    again = open_checkpoints(run, ctx)
    folder, state = again.find_newest()
    assert (folder.name, state, (folder / "part").read_text()) == (
        "step-00006",
        {"done": 6},
        "weights",
    )
    save(again, 8)
    assert names(kept) == ["step-00006", "step-00008"]


def test_an_attempt_that_saved_nothing_hides_nothing(run, ctx):
    save(open_checkpoints(run, ctx), 2)
    open_checkpoints(run, ctx)
    assert open_checkpoints(run, ctx).find_newest()[1] == {"done": 2}


def test_a_half_uploaded_checkpoint_is_passed_over(run, ctx, local, caplog):
    save(open_checkpoints(run, ctx), 2, 4)
    (local / "checkpoints" / "1.1-online" / "step-00004" / "part").unlink()
    assert open_checkpoints(run, ctx).find_newest()[1] == {"done": 2}
    assert re.search("passed over.*step-00004.*part", caplog.text)


def test_another_process_of_the_machine_finds_what_the_first_one_brought(run, ctx):
    save(open_checkpoints(run, ctx), 2)
    first = open_checkpoints(run, ctx)
    second = open_checkpoints(run, ctx, 1, 1)
    assert first.folder == second.folder
    assert first.find_newest() == second.find_newest()


def test_what_another_user_made_first_is_not_used(tmp_path, monkeypatch):
    """A link at the name that earlier versions used, and one at the folder's own name."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model_index.json").write_text("{}")
    uri = f"file://{tmp_path}/base"
    temporary = tmp_path / "temporary"
    trap = tmp_path / "trap"
    for folder in (temporary, trap):
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    name = hashlib.sha256(uri.encode()).hexdigest()[:32]
    (temporary / f"ebbflow-{name}").symlink_to(trap)
    assert (fetch_once_per_machine(uri) / "model_index.json").read_text() == "{}"
    shutil.rmtree(temporary / f"ebbflow-{os.getuid()}")
    (temporary / f"ebbflow-{os.getuid()}").symlink_to(trap)
    with pytest.raises(PathError, match="alone"):
        fetch_once_per_machine(uri)
    assert list(trap.iterdir()) == []


def test_those_of_a_stage_that_is_over_are_removed(run, ctx, local):
    save(open_checkpoints(run, ctx), 2)
    following = open_checkpoints(run, StageContext(ctx.recipe, 1, 0))
    assert names(local / "checkpoints") == []
    save(following, 2)
    assert names(local / "checkpoints") == ["2.1-online"]
    delete_checkpoints(run)
    delete_checkpoints(run)
    assert not (local / "checkpoints").exists()


def kill_in(write) -> None:
    """A process that dies by SIGKILL while it writes."""
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        return
    try:
        write()
    finally:
        os._exit(1)


def test_attempts_at_a_node_leave_one_folder(run, local):
    """A finished node keeps its files, which Flyte's cache points to, and nothing stays of what was
    killed.
    """

    def in_the_middle(name: str, create) -> None:
        path = make_node_output(run, "1.1 online", name)
        with atomic_write(path, create=create) as partial:
            (partial / "part" if partial.is_dir() else partial).write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)

    def not_by_us() -> None:
        path = make_node_output(run, "1.1 online", "policy")
        path.mkdir()
        (path / "left").write_text("by a stage of a user")
        os.kill(os.getpid(), signal.SIGKILL)

    if "://" in run.folder:
        assert make_node_output(run, "start", "policy") != make_node_output(run, "start", "policy")
        assert not (local).exists()
        return
    write_text(make_node_output(run, "start", "policy"), "finished")
    kill_in(lambda: in_the_middle("policy", Path.mkdir))
    kill_in(lambda: in_the_middle("metrics.json", Path.touch))
    kill_in(not_by_us)
    for name in ("policy", "metrics.json"):
        write_text(make_node_output(run, "1.1 online", name), "whole")
    found = {str(path.relative_to(local)) for path in (local).rglob("*") if path.is_file()}
    assert found == {
        "nodes/start/policy",
        "nodes/1.1-online/policy",
        "nodes/1.1-online/metrics.json",
    }


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_folder_that_a_recipe_names_is_there(tmp_path, scheme):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model_index.json").write_text("{}")
    assert (fetch_folder(f"{scheme}{tmp_path}/base") / "model_index.json").read_text() == "{}"


@pytest.mark.parametrize("kind", [FlyteFile, FlyteDirectory])
def test_the_ranks_of_a_machine_download_an_artifact_once(tmp_path, monkeypatch, kind):
    """One that came later would write into the file that the first one reads."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    there = tmp_path / "store" / "policy"
    file = there / "weights" if kind is FlyteDirectory else there
    file.parent.mkdir(parents=True)
    file.write_bytes(b"first")
    shared = fetch_artifact_once(kind(f"file://{there}"))
    found = shared / "weights" if kind is FlyteDirectory else shared
    before = found.stat()
    assert found.read_bytes() == b"first"
    file.write_bytes(b"never read")
    assert fetch_artifact_once(kind(f"file://{there}")) == shared
    assert (found.read_bytes(), found.stat().st_mtime_ns) == (b"first", before.st_mtime_ns)
    assert fetch_artifact_once(kind(str(there))) == there, (
        "what is on this machine stays where it is"
    )


def test_ranks_that_fetch_at_the_same_time_download_once(tmp_path, monkeypatch):
    """Eight processes would otherwise copy a base model of 58 GB eight times."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "weights").write_bytes(b"weights")
    downloads = tmp_path / "downloads"
    download = FileAccessProvider.get_data

    def counted(self, *arguments, **options):
        with downloads.open("a") as log:
            log.write("one\n")
        return download(self, *arguments, **options)

    monkeypatch.setattr(FileAccessProvider, "get_data", counted)
    together = multiprocessing.get_context("fork").Barrier(4)
    ranks = []
    for _ in range(4):
        if not (rank := os.fork()):
            try:
                together.wait(timeout=60)
                os._exit(
                    fetch_artifact_once(FlyteDirectory(f"file://{tmp_path}/base"))
                    .joinpath("weights")
                    .read_bytes()
                    != b"weights"
                )
            finally:
                os._exit(1)
        ranks.append(rank)
    assert [os.waitpid(rank, 0)[1] for rank in ranks] == [0] * 4
    assert downloads.read_text() == "one\n"
