"""A stage that is killed anywhere and started again ends with the same bytes as one that was never
killed.

The points are drawn at random: ``EBBFLOW_FAULT_SEED`` draws others. Every one is a real process
that kills itself with SIGKILL.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from killed_cases import POINTS, Death, attempt

from ebbflow.data.prompts import write_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.recipe import load_recipe
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training.policy_metadata import write_base_policy
from tests.forked import CONTEXT
from tests.glyph_stages import small_stage

SEED = int(os.environ.get("EBBFLOW_FAULT_SEED", "1"))
TIMED = ("seconds", "ms_per", "images_per", "push", "utilisation")
ONLINE = {
    "kind": "online",
    "steps": 4,
    "prompts_per_step": 2,
    "sampler": {"steps": 4},
    "window": {"kind": "fixed", "size": 2},
}
OFFLINE = {"kind": "offline", "prompts": 4, "shards": 2, "epochs": 2, "batch_size": 8}
STAGES: dict[str, dict[str, Any]] = {
    "online": {
        "stage": ONLINE | {"algorithm": {"name": "flow_grpo"}, "reference": {"weight": 0.01}},
        "policy": {"train": "full"},
    },
    "one step off": {
        "stage": ONLINE
        | {
            "algorithm": {"name": "mix_grpo"},
            "mode": "one_step_off",
            "advantages": {"running": True},
        },
        "policy": {"train": "lora", "rank": 2, "ema": {"slope": 0.5, "max_decay": 0.5}},
    },
    "old policy": {
        "stage": {
            **ONLINE,
            "algorithm": {"name": "diffusion_nft"},
            "sampler": {"name": "ode", "steps": 3},
            "window": None,
        },
        "policy": {"train": "full", "ema": {"slope": 0.5, "max_decay": 0.5}},
    },
    "offline": {
        "stage": OFFLINE | {"sampler": {"name": "ode", "steps": 3}},
        "policy": {"train": "lora", "rank": 2, "ema": {"slope": 0.5, "max_decay": 0.5}},
    },
}
STUDENT = {
    "stage": {
        **ONLINE,
        "algorithm": {"name": "dmd2", "fake_updates": 2},
        "sampler": {"steps": 2},
        "window": None,
    }
}
STUDENT["policy"] = {"train": "lora", "rank": 2}
A_STAGE = 8
IN_MAKE_TEST = 4
"""Random points in each stage, and how many of them cover every kind in one or another stage."""


class Stages:
    """Folders with what a stage needs, each with an uninterrupted run in it, and processes that run
    in them.
    """

    def __init__(self, folder: Path, base: Path, prompts: pa.Table) -> None:
        self.folder = folder
        self.base = base
        self.prompts = prompts
        self.known: dict[str, dict[str, Any]] = {}

    def run(self, stage: str, name: str, death: Death | None = None) -> int | None:
        """The exit code of an attempt."""
        process = CONTEXT.Process(target=attempt, args=(self.folder / stage, name, death))
        process.start()
        process.join()
        return process.exitcode

    def outcome(self, stage: str, name: str) -> dict[str, Any]:
        return json.loads((self.folder / stage / f"{name}.json").read_text())

    def whole(self, stage: str) -> dict[str, Any]:
        """What an uninterrupted run says of itself."""
        if stage not in self.known:
            folder = self.folder / stage
            keys = {**STAGES, "student": STUDENT}[stage]
            folder.mkdir()
            (folder / "base").symlink_to(self.base)
            write_prompts(self.prompts, folder / "prompts.parquet")
            training = {"group_size": 4, "micro_batch": 8, "checkpoints": {"every": 1}} | keys[
                "stage"
            ]
            training = small_stage(
                {key: value for key, value in training.items() if value is not None}
            )
            rewards = {"rewards": [{"name": "jpeg_incompressibility"}], "guardrails": []}
            recipe = {"stages": [training], "policy": keys["policy"], **rewards}
            (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
            loaded = load_recipe(folder / "recipe.yaml")
            write_base_policy(
                folder / "start", verify_folder(self.base), loaded.digest, loaded.policy
            )
            assert self.run(stage, "whole") == 0
            self.known[stage] = self.outcome(stage, "whole")
        return self.known[stage]


@pytest.fixture(scope="module")
def stages(tmp_path_factory, base_folder, make_prompts):
    prompts = pa.Table.from_pylist([vars(prompt) for prompt in make_prompts(8)], PROMPTS)
    return Stages(tmp_path_factory.mktemp("killed"), base_folder, prompts)


def untimed(rows):
    return [{key: value for key, value in row.items() if not key.startswith(TIMED)} for row in rows]


def last_checkpoint(folder):
    """Digest of every tensor of the newest checkpoint, the optimiser's too."""
    newest = max(folder.glob("step-*"))
    files = json.loads((newest / "manifest.json").read_text())["files"]
    return newest.name, {
        name: about["sha256"] for name, about in files.items() if name.endswith(".safetensors")
    }


def same_as_never_killed(stages, stage, name):
    folder = stages.folder / stage
    assert verify_folder(folder / name) == verify_folder(folder / "whole")
    assert untimed(stages.outcome(stage, name)["rows"]) == untimed(stages.whole(stage)["rows"])
    assert last_checkpoint(folder / f"{name}-checkpoints") == last_checkpoint(
        folder / "whole-checkpoints"
    )
    left = [path.name for path in folder.rglob("*") if "partial" in path.name]
    assert left == []


def turn_of(stage, index):
    """The point whose turn it is; a stage that never comes by it draws another."""
    return list(POINTS)[(index * len(STAGES) + list(STAGES).index(stage)) % len(POINTS)]


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(index, marks=[pytest.mark.exhaustive] * (index >= IN_MAKE_TEST))
        for index in range(A_STAGE)
    ],
)
@pytest.mark.parametrize("stage", STAGES)
def test_killed_anywhere_it_ends_with_the_same_bytes(stages, stage, index):
    calls = stages.whole(stage)["calls"]
    draws = random.Random(f"{SEED} {stage} {index}")
    point = turn_of(stage, index)
    if point not in calls:
        point = draws.choice(sorted(calls))
    kill_and_resume(stages, stage, index, point, draws)


@pytest.mark.exhaustive
@pytest.mark.parametrize("point", POINTS)
def test_a_student_killed_anywhere_ends_with_the_same_bytes(stages, point):
    """Its fake score and that one's optimiser, too."""
    index = list(POINTS).index(point)
    draws = random.Random(f"{SEED} student {point}")
    if point not in stages.whole("student")["calls"]:
        point = "before the optimiser's step"  # of one of the two, at another call
    kill_and_resume(stages, "student", index, point, draws)


def kill_and_resume(stages, stage, index, point, draws):
    calls = stages.whole(stage)["calls"]
    death = Death(point, draws.randint(1, calls[point]), draws.random() < 0.5)
    name = f"killed-{index}"
    assert stages.run(stage, name, death) == -9, death
    if (
        draws.random() < 0.3
    ):  # an attempt that saves nothing must not hide what the one before it saved
        assert stages.run(stage, name, Death("metrics", 1, ends=False)) in (-9, 0), death
    assert stages.run(stage, name) == 0, death
    same_as_never_killed(stages, stage, name)


@pytest.mark.parametrize("stage", ["online", "offline"])
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before_it(stages, stage):
    calls = stages.whole(stage)["calls"]
    assert stages.run(stage, "damaged", Death("metrics", calls["metrics"], ends=False)) == -9
    checkpoints = sorted((stages.folder / stage / "damaged-checkpoints").glob("step-*"))
    (part,) = checkpoints[-1].glob("optimizer-*")
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    assert stages.run(stage, "damaged") == 0
    (logged,) = [
        text
        for text in stages.outcome(stage, "damaged")["logged"]
        if "checkpoint passed over" in text
    ]
    assert checkpoints[-1].name in logged
    assert part.name in logged
    same_as_never_killed(stages, stage, "damaged")


def test_without_any_checkpoint_it_begins_again(stages):
    calls = stages.whole("online")["calls"]
    assert stages.run("online", "bare", Death("metrics", calls["metrics"], ends=False)) == -9
    shutil.rmtree(stages.folder / "online" / "bare-checkpoints")
    assert stages.run("online", "bare") == 0
    same_as_never_killed(stages, "online", "bare")


def test_every_kind_of_point_has_its_turn(stages):
    """What is drawn covers them all, and more than 25 in all."""
    turns = [(stage, turn_of(stage, index)) for stage in STAGES for index in range(IN_MAKE_TEST)]
    assert {point for stage, point in turns if point in stages.whole(stage)["calls"]} == set(POINTS)
    assert len(STAGES) * A_STAGE > 25
