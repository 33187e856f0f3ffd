"""Folders that tasks find by a path or a URI: the checkpoints of an earlier attempt, and what a recipe names."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbflow.artifacts import new_folder
from ebbflow.records import TrackedRun
from ebbflow.stage import Place
from ebbflow.training.checkpoint import newest_checkpoint
from tasks.files import fetch_folder, kept_checkpoints


class Preempted(Exception):
    """What ends the first attempt."""


def save(checkpoints, step):
    """What ``Checkpoints.save`` does, without a stage; the last two are kept."""
    new = checkpoints.folder / f"step-{step:05d}"
    with new_folder(new) as unfinished:
        (unfinished / "state.json").write_text(str(step))
    for old in sorted(checkpoints.folder.glob("step-*"))[:-2]:
        for path in old.iterdir():
            path.unlink()
        old.rmdir()
    checkpoints.saved(new)


def first_attempt(run, place):
    with kept_checkpoints(run, place) as checkpoints:
        assert newest_checkpoint(checkpoints.folder) is None
        for step in (2, 4, 6):
            save(checkpoints, step)
        raise Preempted


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_the_next_attempt_finds_them_and_nothing_is_left_at_the_end(make_recipe, tmp_path, scheme):
    home = tmp_path / "run"
    run = TrackedRun(run_id="r", experiment_id="e", tracking_uri="", folder=f"{scheme}{home}", recipe_digest="d", started_at=0.0)
    place = Place(make_recipe(), 0, 0)
    with pytest.raises(Preempted):
        first_attempt(run, place)
    kept = home / "checkpoints" / "1.1-online"
    assert sorted(path.name for path in kept.iterdir()) == ["step-00004", "step-00006"]
    with kept_checkpoints(run, place) as checkpoints:
        newest = newest_checkpoint(checkpoints.folder)
        assert newest is not None
        assert (newest.name, Path(newest / "state.json").read_text()) == ("step-00006", "6")
        save(checkpoints, 8)
        assert sorted(path.name for path in kept.iterdir()) == ["step-00006", "step-00008"]
    assert not kept.exists()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_folder_that_a_recipe_names_is_there(tmp_path, scheme):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model_index.json").write_text("{}")
    assert (fetch_folder(f"{scheme}{tmp_path}/base") / "model_index.json").read_text() == "{}"
