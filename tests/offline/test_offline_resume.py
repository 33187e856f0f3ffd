"""Offline training that goes on from a checkpoint ends with the same bytes as training that never
stopped.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ebbflow.data import prompt_windows
from ebbflow.offline.training import train_offline_folder
from ebbflow.recipe import Recipe
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.disk import DiskFullError
from ebbflow.training import shared_prompts
from ebbflow.training.checkpoint import CheckpointError, Checkpoints
from ebbflow.training.distributed import join_process_group
from ebbflow.training.policy_metadata import read_policy_metadata
from ebbflow.training.stop_conditions import Preempted
from ebbflow.training.update import PolicyUpdater
from tests.offline_stage import write_offline_stage
from tests.two_processes import as_two_ranks

pytestmark = pytest.mark.any_cpu

TIMED = ("seconds", "ms_per")
UPDATES = 8


class Killed(Exception):
    """What the test ends a stage with."""


@pytest.fixture
def world(make_prompts, make_recipe, base_folder, scorer, tmp_path):
    """``world(**recipe)``: the folder of a stage with its rollouts, advantages, prompts and
    starting policy; its recipe.
    """

    def prepared(offline=None, policy=None, model=None, name="stage"):
        stage = {"prompts": 8, "epochs": 2, "batch_size": 8, "checkpoints": {"every": 2}}
        recipe = make_recipe(
            offline=stage | (offline or {}), policy=policy or {}, model=model or {}
        )
        (tmp_path / name).mkdir()
        write_offline_stage(tmp_path / name, recipe, base_folder, make_prompts(8), scorer)
        return tmp_path / name, recipe.model_dump(mode="json"), base_folder

    return prepared


def train(
    world: tuple[Path, Any, Path], name: str, at: int | None = None, happens: str = ""
) -> MetricsRecorder:
    """One attempt at the stage called ``name``; as optimiser step ``at`` begins, it is killed, or
    preempted.
    """
    folder, recipe, base = world
    ctx = StageContext(Recipe.model_validate(recipe), 0, 1)
    recorder = MetricsRecorder()
    update = PolicyUpdater.update_policy

    def doomed(updater: PolicyUpdater, *arguments: Any) -> dict[str, float]:
        if updater.updates == at and happens == "killed":
            raise Killed
        if updater.updates == at and happens == "preempted":
            os.kill(os.getpid(), signal.SIGTERM)
        return update(updater, *arguments)

    with (
        pytest.MonkeyPatch.context() as patch,
        join_process_group(recipe["model"]["cpu_offload"]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        patch.setattr(PolicyUpdater, "update_policy", doomed)
        rollouts, (prompts, advantages) = (
            sorted(folder.glob("rollouts-*")),
            [folder / f"{table}.parquet" for table in ("prompts", "advantages")],
        )
        checkpoints = Checkpoints(ctx, folder / f"kept-{name}")
        train_offline_folder(
            ctx,
            StageFolders(base, folder / "start", prompts, folder / name),
            rollouts,
            advantages,
            recorder,
            checkpoints,
        )
    return recorder


def rows(recorder):
    return [
        {key: value for key, value in row.items() if not key.startswith(TIMED)}
        for row in recorder.metrics_rows
    ]


def kept(folder, name):
    return sorted(path.name for path in (folder / f"kept-{name}").glob("step-*"))


LINEAR = {"kind": "linear", "warmup": 2}
CASES = {
    "nft": ({}, {}),
    "average of lora": ({}, {"train": "lora", "rank": 2, "ema": {"slope": 0.5, "max_decay": 0.5}}),
    "groups": ({"algorithm": {"name": "dgpo"}, "reference": {"weight": 0.1}}, {}),
    "adamw": (
        {"algorithm": {"name": "awm"}, "optimizer": {"weight_decay": 0.1, "schedule": LINEAR}},
        {"ema": {"slope": 0.5, "max_decay": 0.5}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_killed_stage_ends_with_the_same_bytes(world, case):
    """Killed before the first checkpoint, between two, and right after one."""
    stage = world(*CASES[case])
    whole = train(stage, "whole")
    assert [row["step"] for row in whole.metrics_rows] == list(range(UPDATES))
    for at in (1, 3, 4):
        with pytest.raises(Killed):
            train(stage, "killed", at, "killed")
    again = train(stage, "killed")
    assert verify_folder(stage[0] / "killed") == verify_folder(stage[0] / "whole")
    assert rows(again) == rows(whole)
    assert kept(stage[0], "killed") == ["step-00004", "step-00006"]


def test_a_killed_stage_that_encodes_in_windows_ends_with_the_same_bytes(world, monkeypatch):
    stage = world()
    monkeypatch.setattr(prompt_windows, "PROMPTS_PER_WINDOW", 5)
    encoded = []
    encode = shared_prompts.encode_prompts_together

    def watch(model, prompts, negatives):
        encoded.append(sorted(prompt.prompt_id for prompt in prompts))
        return encode(model, prompts, negatives)

    monkeypatch.setattr(shared_prompts, "encode_prompts_together", watch)
    train(stage, "whole")
    windows = list(encoded)
    # Two shards of four prompts, in two epochs. The second epoch begins with the shard that the
    # first ended with, and so in its window.
    assert [len(window) for window in windows] == [4, 4, 4]
    assert windows[0] == windows[2] != windows[1]
    with pytest.raises(Killed):
        train(stage, "killed", 5, "killed")
    encoded.clear()
    train(stage, "killed")
    assert encoded == windows[1:]
    assert verify_folder(stage[0] / "killed") == verify_folder(stage[0] / "whole")


def test_a_stage_that_is_told_to_end_saves_after_the_step(world, caplog):
    caplog.set_level(logging.INFO, "ebbflow")
    stage = world()
    whole = train(stage, "whole")
    for at in (0, 4, 6):
        said = rf"1.2 offline was preempted \(SIGTERM\) after {at + 1} of 8 steps; a checkpoint is"
        with pytest.raises(Preempted, match=said):
            train(stage, "preempted", at, "preempted")
        assert kept(stage[0], "preempted")[-1] == f"step-{at + 1:05d}"
    again = train(stage, "preempted")
    resumed = [line for line in caplog.messages if "resuming after step" in line]
    for at, line in zip((0, 4, 6), resumed, strict=True):
        assert f"resuming after step {at + 1} of 8" in line
    assert verify_folder(stage[0] / "preempted") == verify_folder(stage[0] / "whole")
    assert rows(again) == rows(whole)


def test_preempted_in_the_last_step_it_is_over_and_the_next_one_leaves(world):
    stage = world()
    preempted = rows(train(stage, "preempted", UPDATES - 1, "preempted"))
    with pytest.raises(Preempted, match="after 1 of 8 steps; a checkpoint is saved"):
        train(stage, "whole")
    assert preempted == rows(train(stage, "whole"))
    assert verify_folder(stage[0] / "preempted") == verify_folder(stage[0] / "whole")


def test_a_full_disk_is_named_and_no_part_stays(world, monkeypatch):
    def full(folder: Path, updater: PolicyUpdater) -> None:
        (folder / "begun").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ebbflow.offline.training.write_part", full)
    stage = world()
    with pytest.raises(DiskFullError, match=r"\.parts-0 could not be written: the disk is full"):
        train(stage, "full")
    assert list(stage[0].rglob("begun")) == []


def test_a_spent_budget_ends_it_with_what_was_learnt(world):
    stage = world(offline={"max_hours": 1e-9})
    assert len(train(stage, "short").metrics_rows) == 1
    assert read_policy_metadata(stage[0] / "short").version == 1


def as_a_rank(stage: tuple[Path, Any, Path], name: str, at: int | None, happens: str) -> None:
    try:
        train(stage, name, at, happens)
    except (Killed, Preempted) as error:
        (stage[0] / f"said-{os.environ['RANK']}").write_text(f"{type(error).__name__} {error}")


def weights(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.safetensors")}


@pytest.mark.exhaustive
def test_two_processes_that_offload_learn_and_resume_with_the_same_bytes(world):
    held = world()
    offloaded = world(model={"cpu_offload": True}, name="offloaded")
    as_two_ranks(as_a_rank, held, "whole", None, "")
    as_two_ranks(as_a_rank, offloaded, "again", 3, "preempted")
    assert kept(offloaded[0], "again")[-1] == "step-00004"
    as_two_ranks(as_a_rank, offloaded, "again", None, "")
    assert weights(offloaded[0] / "again") == weights(held[0] / "whole")
    assert len(weights(held[0] / "whole")) == 2


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param({}, id="full", marks=pytest.mark.exhaustive),
        pytest.param({"train": "lora", "rank": 2}, id="lora"),
    ],
)
def test_two_processes_save_their_parts_and_any_number_goes_on(world, policy):
    stage = world(policy={**policy, "ema": {"slope": 0.5, "max_decay": 0.5}})
    folder = stage[0]
    as_two_ranks(as_a_rank, stage, "whole", None, "")
    as_two_ranks(as_a_rank, stage, "again", 3, "preempted")
    for rank in range(2):
        assert (
            (folder / f"said-{rank}")
            .read_text()
            .startswith("Preempted 1.2 offline was preempted (SIGTERM)")
        )
    parts = {path.name for path in (folder / "kept-again" / "step-00004").glob("*.safetensors")}
    assert parts >= {
        f"{kind}-0000{rank}-of-00002.safetensors"
        for kind in ("parameters", "ema", "optimizer")
        for rank in (0, 1)
    }
    shutil.copytree(folder / "kept-again", folder / "kept-alone")
    as_two_ranks(as_a_rank, stage, "again", None, "")
    assert verify_folder(folder / "again") == verify_folder(folder / "whole")
    train(stage, "alone")
    for path in (folder / "whole").rglob("*.safetensors"):
        found = load_file(folder / "alone" / path.relative_to(folder / "whole"))
        expected = load_file(path)
        assert (
            max(float((found[key] - value).abs().max()) for key, value in expected.items()) < 1e-5
        )


def test_another_number_of_steps_is_refused(world):
    stage = world()
    with pytest.raises(Killed):
        train(stage, "again", 3, "killed")
    (stage[0] / "rollouts-1.parquet").unlink()
    with pytest.raises(
        CheckpointError, match=r"is of training in 8 steps, this one has 4: .*or remove it"
    ):
        train(stage, "again")
