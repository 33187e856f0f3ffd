"""A turn of the flywheel as a user takes it: two commands, each in a process of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from ebbflow.compute import set_up_process
from ebbflow.data.labels import read_labels
from ebbflow.data.local_prompts import prepare_local_prompts
from ebbflow.data.prompt_files import read_prompt_file
from ebbflow.labeling.sources import load_queue
from ebbflow.recipe import load_recipe
from ebbflow.registry.reward_models import find_champion_reward_model
from ebbflow.reward_training import queue as queues
from ebbflow.run_summary import read_summary
from tests.forked import run_forked

ROOT = Path(__file__).parents[2]
EBBFLOW = Path(sys.executable).with_name("ebbflow")
RECIPE: dict[str, Any] = {
    "name": "fly",
    "model": {"training": {"steps": 30, "batch": 16}},
    "prompts": {"count": 100, "validation": 8, "held_out": 24},
    "reward_model": {
        "name": "taste",
        "labels": ["labels"],
        "epochs": 4,
        "lr": 3.0e-3,
        "held_out": 0.4,
        "queue": 60,
    },
    "rewards": [{"name": "model", "uri": "models:/taste@champion"}],
    "guardrails": ["similarity"],
    "policy": {"start": "champion"},
    "stages": [
        {
            "kind": "offline",
            "only_from_base": True,
            "algorithm": {"name": "sft", "noise_levels": 1},
            "data": {
                "path": "ebbflow:datasets/glyph_pictures/pictures.parquet",
                "caption_dropout": 0.0,
            },
            "batch_size": 64,
            "epochs": 1,
        },
        {
            "kind": "online",
            "steps": 2,
            "prompts_per_step": 2,
            "group_size": 4,
            "micro_batch": 8,
            "algorithm": {"name": "diffusion_nft", "noise_levels": 2, "sigma": {"kind": "uniform"}},
            "reference": {"weight": 0.01},
            "sampler": {"name": "ode", "steps": 4},
        },
    ],
    "evaluation": {"steps": 3, "samples": 1},
    "promotion": {"model_name": "fly-policy"},
}


def run_command(folder: Path, *arguments: str) -> str:
    cache = {"FLYTE_LOCAL_CACHE_ENABLED": "true", "EBBFLOW_LOCAL_CACHE": str(folder / "cache")}
    # The stand-in's taste is the recogniser's, whose network the reward model begins with: the
    # first one then agrees with it also on pictures of an untrained model.
    environment = os.environ | {"HOME": str(folder), "PYTHONPATH": str(ROOT)} | cache
    done = run_forked([str(EBBFLOW), *arguments], cwd=folder, env=environment, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.exhaustive
def test_two_commands_turn_the_circle_and_leave_the_next_queue(tmp_path: Path) -> None:
    (tmp_path / "fly.yaml").write_text(yaml.safe_dump(RECIPE))
    label = ["label", "labels/turn-1", "fly.yaml", "--stand-in", "recognizer"]
    assert "60 answers" in run_command(tmp_path, *label)
    run_command(tmp_path, "turn", "fly.yaml")
    store = f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}"
    version = find_champion_reward_model(store, "taste")
    assert version is not None
    # The run's record says which reward model it was.
    (run,) = (tmp_path / "runs").glob("fly-*")
    (reward,) = yaml.safe_load((run / "recipe.yaml").read_text())["rewards"]
    assert (reward["uri"], reward["digest"]) == (version.uri, version.digest)
    assert "cost" in read_summary(run / "summary.json")
    folder = tmp_path / "runs" / "queues" / "fly"
    rows, _ = read_prompt_file(folder / "prompts.jsonl")
    reasons = {json.loads(row.metadata)["reason"] for row in rows}
    assert reasons <= {"the reward model contradicts an answer", "the reward fell"}
    queue = load_queue(folder / "queue.parquet", 1000)
    labels = read_labels([tmp_path / "labels"])
    asked = {picture for pair in queue.pairs for picture in (one.png for one in pair.pictures)}
    assert len(queue.pairs) == 60
    assert not asked & set(labels.pictures)
    check_labelled_policy(tmp_path, run)
    check_later_turn(tmp_path, run)


def check_labelled_policy(folder: Path, run: Path) -> None:
    """People label pictures of the fine-tuned policy that rewards train next."""
    recipe = load_recipe(folder / "fly.yaml")
    # As `ebbflow label` does: sums depend on the number of threads.
    set_up_process(recipe)
    queue = folder / "first"
    queue.mkdir()
    _, labelled = queues._prepare_start(recipe, prepare_local_prompts(recipe), queue)
    (weights,) = labelled.rglob("*.safetensors")
    (trained,) = (run / "nodes" / "1.1-offline" / "policy").rglob("*.safetensors")
    ours, theirs = load_file(weights), load_file(trained)
    # A process of the pipeline's training group adds its gradients in another order.
    assert max((ours[name] - theirs[name]).abs().max().item() for name in theirs) < 1e-5


def check_later_turn(folder: Path, run: Path) -> None:
    """A run that starts from an earlier policy skips the stage that is for the base model."""
    start = {"path": str(run / "nodes" / "1.2-online" / "policy")}
    later = {
        **RECIPE,
        "name": "later",
        "policy": {"start": start},
        "rewards": [{"name": "recognizer"}],
    }
    (folder / "later.yaml").write_text(yaml.safe_dump(later))
    run_command(folder, "run", "later.yaml")
    (second,) = (folder / "runs").glob("later-*")
    trained = {path.parent.name for path in (second / "nodes").glob("*/policy")}
    assert "1.2-online" in trained
    assert "1.1-offline" not in trained
