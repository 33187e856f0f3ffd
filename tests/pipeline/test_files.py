"""Folders that tasks find by a path or a URI: the checkpoints of an earlier attempt, and what a recipe names."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from ebbflow.data.records import TrackedRun
from ebbflow.stage import StageContext
from ebbflow.storage.disk import PathError
from tasks.files import delete_checkpoints, fetch_folder, fetch_once_per_machine, open_checkpoints


@pytest.fixture(params=["", "file://"])
def run(request, tmp_path) -> TrackedRun:
    """A run in a folder, or at a URI that only Flyte's own store reaches."""
    folder = f"{request.param}{tmp_path / 'run'}"
    return TrackedRun(run_id="r", experiment_id="e", tracking_uri="", folder=folder, recipe_digest="d", started_at=0.0)


@pytest.fixture
def ctx(make_recipe) -> StageContext:
    return StageContext(make_recipe(online={"checkpoints": {"every": 2}}), 0, 0)


def save(checkpoints, *steps):
    for step in steps:
        with checkpoints.saving(step, {"done": step}) as folder:
            (folder / "part").write_text("weights")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_the_next_attempt_finds_what_the_last_one_saved(run, ctx, tmp_path):
    kept = tmp_path / "run" / "checkpoints" / "1.1-online"
    first = open_checkpoints(run, ctx)
    assert first.newest() is None
    save(first, 2, 4, 6)
    assert names(kept) == ["step-00004", "step-00006"]
    again = open_checkpoints(run, ctx)
    folder, state = again.newest()
    assert (folder.name, state, (folder / "part").read_text()) == ("step-00006", {"done": 6}, "weights")
    save(again, 8)
    assert names(kept) == ["step-00006", "step-00008"]


def test_an_attempt_that_saved_nothing_hides_nothing(run, ctx):
    save(open_checkpoints(run, ctx), 2)
    open_checkpoints(run, ctx)
    assert open_checkpoints(run, ctx).newest()[1] == {"done": 2}


def test_a_half_uploaded_checkpoint_is_passed_over(run, ctx, tmp_path, caplog):
    save(open_checkpoints(run, ctx), 2, 4)
    (tmp_path / "run" / "checkpoints" / "1.1-online" / "step-00004" / "part").unlink()
    assert open_checkpoints(run, ctx).newest()[1] == {"done": 2}
    assert re.search("passed over.*step-00004.*part", caplog.text)


def test_another_process_of_the_machine_finds_what_the_first_one_brought(run, ctx):
    save(open_checkpoints(run, ctx), 2)
    first, second = open_checkpoints(run, ctx), open_checkpoints(run, ctx, first=False)
    assert first.folder == second.folder
    assert first.newest() == second.newest()


def test_what_another_user_made_first_is_not_used(tmp_path, monkeypatch):
    """A link at the name that earlier versions used, and one at the folder's own name."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model_index.json").write_text("{}")
    uri = f"file://{tmp_path}/base"
    temporary, trap = tmp_path / "temporary", tmp_path / "trap"
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


def test_those_of_a_stage_that_is_over_are_removed(run, ctx, tmp_path):
    save(open_checkpoints(run, ctx), 2)
    following = open_checkpoints(run, StageContext(ctx.recipe, 1, 0))
    assert names(tmp_path / "run" / "checkpoints") == []
    save(following, 2)
    assert names(tmp_path / "run" / "checkpoints") == ["2.1-online"]
    delete_checkpoints(run)
    delete_checkpoints(run)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_folder_that_a_recipe_names_is_there(tmp_path, scheme):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model_index.json").write_text("{}")
    assert (fetch_folder(f"{scheme}{tmp_path}/base") / "model_index.json").read_text() == "{}"
