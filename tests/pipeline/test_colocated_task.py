"""``train_online_colocated`` as a task: its launcher starts two processes, which generate and train
what one process does.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.data.prompts import write_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.online.train_folder import train_online_folder
from ebbflow.recipe import Recipe
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.artifacts import verify_folder
from ebbflow.tracking.parent_run import start_run
from ebbflow.training.policy_metadata import write_base_policy
from tasks.train_online_colocated import train_online_colocated
from tasks.types import BaseModelArtifact, TrainedPolicy
from tests.forked import separate_fork_server
from tests.glyph_stages import small_stage


def build_recipe(placement: str, output: Path) -> Recipe:
    stage = {
        "kind": "online",
        "placement": placement,
        "steps": 2,
        "prompts_per_step": 4,
        "group_size": 4,
        "micro_batch": 8,
        "updates_per_step": 1,
        "sampler": {"name": "flow_sde", "steps": 4},
        "window": {"kind": "fixed", "size": 2},
        "algorithm": {"name": "mix_grpo"},
    }
    return Recipe.model_validate(
        {
            "output": str(output),
            "rewards": [{"name": "similarity"}],
            "guardrails": [],
            "stages": [small_stage(stage)],
        }
    )


def test_the_task_trains_on_two_processes_what_one_process_trains(
    base_folder: Path, make_prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    recipe = build_recipe("colocated", tmp_path / "runs")
    table = tmp_path / "prompts.parquet"
    start = tmp_path / "start"
    rows = [vars(prompt) for prompt in make_prompts(8)]
    write_prompts(pa.Table.from_pylist(rows, PROMPTS), table)
    write_base_policy(start, verify_folder(base_folder), recipe.digest, recipe.policy)

    with separate_fork_server():
        trained = train_online_colocated(
            recipe=recipe,
            run=start_run(recipe, None),
            base=BaseModelArtifact(
                folder=FlyteDirectory(str(base_folder)), seconds=0, finished_at=0
            ),
            policy=TrainedPolicy(folder=FlyteDirectory(str(start))),
            prompts=FlyteFile(str(table)),
            round=0,
            stage=0,
        )

    assert trained.record is not None
    assert trained.record.steps == 2
    assert verify_folder(Path(trained.folder.download()))
    (timeline,) = (tmp_path / "runs").rglob("timeline.json")
    spans = json.loads(timeline.read_text())["spans"]
    for role in ("rollout", "training"):
        assert {span["worker"] for span in spans if span["role"] == role} == {0, 1}

    alone = MetricsRecorder()
    train_online_folder(
        StageContext(build_recipe("in_process", tmp_path / "runs"), 0, 0),
        StageFolders(base_folder, start, table, tmp_path / "alone"),
        alone,
    )
    assert trained.metrics is not None
    group_rows = json.loads(Path(trained.metrics.download()).read_text())
    # Pixels are whole numbers, which the last bits of a latent can move by one.
    for row, row_alone in zip(group_rows, alone.metrics_rows, strict=True):
        assert row["reward/mean"] == pytest.approx(row_alone["reward/mean"], abs=2e-3)
