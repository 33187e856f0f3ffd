"""A policy, its student of few steps, and more training of the student: the stages of the shipped
recipe, one after another.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from ebbflow.data.prompts import write_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.online import train_folder
from ebbflow.online.train_folder import train_online_folder
from ebbflow.recipe import Recipe, load_recipe
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training.policy_metadata import read_policy_metadata, write_base_policy

SHIPPED = Path(__file__).parents[2] / "workflows" / "recipes" / "glyph_few_steps.yaml"
SMALL = {
    "steps": 2,
    "prompts_per_step": 2,
    "group_size": 4,
    "micro_batch": 8,
    "updates_per_step": 1,
    "checkpoints": None,
}
POLICY_GRADIENT = {"kind": "online", "algorithm": {"name": "flow_grpo"}, "window": {"kind": "all"}}
POLICY_GRADIENT |= {"sampler": {"name": "cps", "eta": 1.0, "steps": 2}}


@pytest.fixture
def train(base_folder, make_prompts, scorer, tmp_path, monkeypatch):
    """``train(recipe)``: the policy folders of its stages, and their metrics."""
    monkeypatch.setattr(train_folder, "load_scorer", lambda rewards, guardrails: scorer)
    write_prompts(
        pa.Table.from_pylist([vars(prompt) for prompt in make_prompts(9)], PROMPTS),
        tmp_path / "prompts.parquet",
    )

    def run(recipe):
        folders = [tmp_path / "start"]
        metrics = []
        write_base_policy(folders[0], verify_folder(base_folder), recipe.digest, recipe.policy)
        for stage in range(len(recipe.stages)):
            recorder = MetricsRecorder()
            folders.append(tmp_path / f"policy-{stage}")
            ctx = StageContext(recipe, 0, stage)
            train_online_folder(
                ctx,
                StageFolders(base_folder, folders[-2], tmp_path / "prompts.parquet", folders[-1]),
                recorder,
            )
            metrics.append(recorder.metrics_rows)
        return folders[1:], metrics

    return run


def small(stage):
    keys = stage if isinstance(stage, dict) else stage.model_dump(exclude_unset=True)
    return keys | SMALL


def test_the_student_of_the_shipped_recipe_learns_on(train):
    shipped = load_recipe(SHIPPED)
    first, student, learning = shipped.stages
    assert (
        first.sampler.steps
        > student.sampler.steps
        == learning.sampler.steps
        == shipped.evaluation.steps
    )
    stages = [small(stage) for stage in shipped.stages]
    folders, metrics = train(Recipe.model_validate({"stages": stages}))
    kept = [read_policy_metadata(folder).copies for folder in folders]
    assert kept == [("old",), ("fake",), ("old",)]
    assert all(step["fake/loss"] > 0 and step["matching/gradient"] > 0 for step in metrics[1])
    assert all(step["nft/better_error"] > 0 for step in metrics[2])
    assert len({verify_folder(folder) for folder in folders}) == 3


def test_a_policy_gradient_trains_a_student_with_the_sampler_of_its_distillation(train):
    stages = [
        small({"kind": "online", "algorithm": {"name": "dmd2"}, "sampler": {"steps": 2}}),
        small(POLICY_GRADIENT),
    ]
    recipe = Recipe.model_validate({"stages": stages, "policy": {"train": "lora", "rank": 2}})
    assert recipe.stages[0].sampler == recipe.stages[1].sampler
    folders, metrics = train(recipe)
    assert metrics[1][0]["ratio/first_deviation"] < 1e-6
    assert read_policy_metadata(folders[1]).copies == ()
