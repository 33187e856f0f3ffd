"""An online stage with ``placement: ray`` in the pipeline, as a user runs it on a machine of their
own.
"""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory

from ebbflow.online import ray_logs
from ebbflow.online.ray_workers import TrainingDied
from ebbflow.recipe import Recipe
from tasks import train_online_ray as module
from tasks.start_run import _prepare_process
from tests.glyph_stages import small_stage
from tests.pipeline.conftest import run_pipeline

FRACTIONS = {"cpus": 0.25}
STAGE = small_stage(
    {
        "kind": "online",
        "steps": 2,
        "prompts_per_step": 2,
        "group_size": 4,
        "micro_batch": 8,
        "placement": "ray",
    }
)


@pytest.mark.exhaustive
def test_a_stage_on_ray_runs_in_the_pipeline(tmp_path: Path) -> None:
    stage = STAGE | {
        "resources": {
            "training": FRACTIONS,
            "rollout": {**FRACTIONS, "count": 2},
            "reward": FRACTIONS,
        }
    }
    changes = {
        "model": {"training": {"steps": 3, "batch": 4}},
        "prompts": {"count": 24, "validation": 4, "held_out": 4},
        "guardrails": [],
        "evaluation": {"steps": 3, "samples": 1},
    }
    done = run_pipeline(tmp_path, changes | {"stages": [stage]})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (path,) = (tmp_path / "runs").glob("*/summary.json")
    assert json.loads(path.read_text())["seconds"]["1.1 online"] > 0


@pytest.mark.parametrize(
    ("usual", "during"), [("/tmp", f"/tmp/ebbflow-{os.getuid()}"), ("/scratch", "/scratch")]
)
def test_ray_writes_into_a_folder_of_this_user(
    monkeypatch: pytest.MonkeyPatch, usual: str, during: str
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", usual)
    _prepare_process(Recipe.model_validate({"stages": [STAGE | {"placement": "in_process"}]}))
    assert os.environ["RAY_TMPDIR"] == usual
    _prepare_process(Recipe.model_validate({"stages": [STAGE]}))
    assert os.environ["RAY_TMPDIR"] == during


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """``stage(act)``: the task's body where ``act`` is given the actors' folders instead of
    training.
    """

    def run(act: Any, folder: str = "runs/tiny") -> Any:
        def train_stage(ctx: Any, *_: Any, actors: Any) -> Any:
            return act(actors)

        monkeypatch.setattr(module, "train_stage", train_stage)
        artifact = SimpleNamespace(folder=FlyteDirectory(str(tmp_path)))
        given = {
            "recipe": Recipe(),
            "run": SimpleNamespace(folder=folder),
            "base": artifact,
            "policy": artifact,
            "prompts": None,
        }
        return module.train_online_ray.task_function(**given, round=0, stage=0)

    return run


def test_actors_find_their_folders(stage: Any, tmp_path: Path) -> None:
    found = stage(lambda actors: (actors.base(), actors.policy(), actors.teachers))
    assert found == (tmp_path, tmp_path, {})


@pytest.mark.parametrize("dies", [True, False])
def test_the_logs_of_the_cluster_are_kept_however_the_stage_ends(
    stage: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dies: bool
) -> None:
    monkeypatch.setattr(ray_logs, "save_cluster_logs", lambda save: save("host.tar.gz", b"logs"))
    monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", "1")

    def act(actors: Any) -> None:
        if dies:
            raise TrainingDied("training rank 1 died in step 7")

    with pytest.raises(FlyteRecoverableException) if dies else nullcontext():
        stage(act, folder=f"file://{tmp_path}/tiny")
    (packed,) = (tmp_path / "tiny" / "logs").rglob("*.tar.gz")
    assert packed.name == "attempt-1-host.tar.gz"
    assert packed.read_bytes() == b"logs"


def test_a_dead_trainer_is_worth_another_attempt(stage: Any) -> None:
    def die(actors: Any) -> None:
        raise TrainingDied("training rank 1 died in step 7")

    with pytest.raises(FlyteRecoverableException, match="rank 1 died in step 7"):
        stage(die)
