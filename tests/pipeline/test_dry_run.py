"""The dry run: what a run would take, for every shipped recipe, without a model, a prompt file or a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbflow.recipe import load_recipe
from tasks import plan_run as plan
from tasks.deployment import AcceleratedConfig, DeploymentConfig, TrainingGroupConfig
from workflows.post_training import dry_run

RECIPES = sorted((Path(__file__).parents[2] / "workflows" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_planned(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(path)
    monkeypatch.chdir(tmp_path)
    text = dry_run(recipe=recipe)
    assert f"# digest {recipe.digest}" in text
    assert f"every one of rounds: {recipe.rounds}" in text
    for index, stage in enumerate(recipe.stages):
        label = recipe.stage_label(0, index)
        samples = stage.steps * stage.prompts_per_step if stage.kind == "online" else stage.prompts
        (row,) = [line for line in text.splitlines() if line.split()[:2] == label.split() and "," in line or f"{label}  " in line]
        assert f"{samples * stage.group_size:,}" in row
        assert f"{label} training" in text
    assert "GiB that a whole run keeps" in text
    assert not list(tmp_path.iterdir())


def test_the_machines_are_those_of_the_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    group = TrainingGroupConfig(cpu=4, mem="64Gi", gpus=1, accelerator="nvidia-h100")
    decided = DeploymentConfig(train_processes=8, accelerated=AcceleratedConfig(gpus=1, mem="99Gi"), training_group=group)
    monkeypatch.setattr(plan, "DEPLOYMENT", decided)
    text = dry_run(recipe=load_recipe(RECIPES[0].with_name("tiny.yaml")))
    assert "accelerated (text encoding, rollouts, online training, evaluations): processes 1, cores 2, 99Gi, 1 x GPU" in text
    assert "training_group (offline training): processes 8, cores 32, 64Gi, 8 x nvidia-h100" in text
    assert "processes in the training of an offline stage: 8" in text
