"""Whole stages with the engine: its gate, its pushes, and what the ratio says."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import ray
import torch

from ebbflow.models import load_model
from ebbflow.online.loop import run_online_stage
from ebbflow.online.parity_gate import CHECKED_TRANSFERS
from ebbflow.online.ray_actor import ActorFolders
from ebbflow.online.ray_workers import RayWorkers
from ebbflow.online.sample_workers import RolloutWorker
from ebbflow.online.training_worker import TrainingWorker
from ebbflow.online.workers import LocalWorkers
from ebbflow.recipe import Recipe
from ebbflow.rollouts.parity import ParityError
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.storage.artifacts import digest_of_folder
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import write_base_policy
from ebbflow.training.update import PolicyUpdater
from tests.glyph_stages import small_stage

SMALL = {
    "group_size": 3,
    "prompts_per_step": 2,
    "micro_batch": 3,
    "updates_per_step": 1,
    "window": {"kind": "fixed", "size": 2},
}


def stage_of(kept, **online):
    """A stage on the engine, of a recipe's other keys."""
    stages = [
        small_stage(
            {"kind": "online", "engine": "vllm_omni", "sampler": {"steps": 4}, **SMALL, **online}
        )
    ]
    return StageContext(
        Recipe.model_validate(
            {**kept.model_dump(mode="json", exclude={"stages"}), "stages": stages}
        ),
        0,
        0,
    )


@pytest.fixture
def run(both, make_prompts, scorer):
    """``run("sd3", "lora", **online)``: a stage on the engine that the other tests opened; (policy
    before, after, metrics).
    """

    def stage(family, train, **online):
        one = both(family, train)
        ctx = stage_of(one.ctx.recipe, **online)
        recorder = MetricsRecorder()
        policy = Policy(
            load_model(Path(ctx.recipe.model.path), ctx.recipe.model), ctx.recipe.policy, 0
        )
        for name in ctx.following_copies:
            policy.ensure_copy(name)
        before = {name: value.detach().clone() for name, value in policy.parameters.items()}
        trainer = TrainingWorker(ctx, PolicyUpdater(policy, ctx.online_config))
        run_online_stage(
            ctx, LocalWorkers(trainer, scorer, RolloutWorker(one.engine)), make_prompts(4), recorder
        )
        return before, policy.parameters, recorder.metrics_rows

    return stage


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "async"])
def test_without_a_learning_rate_the_ratio_stays_one(run, mode, record_property):
    *_, metrics = run("sd3", "lora", mode=mode, steps=20, optimizer={"lr": 0})
    worst = max(step["ratio/deviation"] for step in metrics)
    record_property("largest |ratio - 1|", worst)
    assert worst < 1e-5
    assert max(step["rollout/delta_max"] for step in metrics) < 1e-5


@pytest.mark.parametrize(
    ("family", "train"), [("sd3", "lora"), ("sd3", "full"), ("qwen_image", "lora")]
)
def test_every_step_generates_with_what_the_last_one_learnt(run, family, train):
    # One step more than the gate looks at, for its samples receive the weights first.
    steps = CHECKED_TRANSFERS + 2
    before, after, metrics = run(
        family, train, steps=steps, optimizer={"lr": 1e-2 if train == "lora" else 1e-3}
    )
    assert any(not torch.equal(value, before[name]) for name, value in after.items())
    assert all(step["rollout/delta_max"] < 1e-5 for step in metrics), (
        "the policy that trains is the one that generated"
    )
    assert all(step["push/bytes"] > 0 for step in metrics)
    *gated, last = metrics
    assert all(step["push/receive_seconds"] == 0 for step in gated)
    assert last["push/receive_seconds"] > 0
    assert all(step["parity/log_prob_max"] < 1e-5 for step in gated)
    assert gated[-1]["parity/weights_effect"] == pytest.approx(1, abs=0.01)


def test_the_old_copy_generates_there_too(run):
    before, after, metrics = run(
        "sd3",
        "lora",
        algorithm={"name": "diffusion_nft"},
        sampler={"name": "ode", "steps": 4},
        window=None,
        steps=3,
        optimizer={"lr": 1e-2},
    )
    assert any(not torch.equal(value, before[name]) for name, value in after.items())
    assert metrics[1]["parity/log_prob_max"] < 1e-5


def test_an_engine_that_is_off_is_refused_before_a_step(run):
    with pytest.raises(ParityError, match=r"1.00e-12 would pass.*engine: diffusers"):
        run("sd3", "lora", steps=1, parity={"max_shift": 1e-12})


def test_the_engine_runs_in_rollout_workers_of_their_own(context_of, make_prompts, tmp_path):
    """On Ray: the worker's engine receives every version through the object store; nothing else is
    different.
    """
    share = {"cpus": 0.3}
    roles = {"training": share, "rollout": share, "reward": share}
    recipe = context_of("sd3", "lora").recipe
    recipe = Recipe.model_validate(
        recipe.model_dump(mode="json") | {"rewards": ["jpeg_compressibility"], "guardrails": []}
    )
    ctx = stage_of(recipe, steps=3, mode="one_step_off", placement="ray", resources=roles)
    recorder = MetricsRecorder()
    base = Path(recipe.model.path)
    start = tmp_path / "start"
    write_base_policy(
        start, digest_of_folder(base), ctx.recipe.digest, ctx.recipe.policy, ctx.recipe.model
    )
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with closing(RayWorkers(ctx, ActorFolders.from_paths(base, start))) as placement:
            run_online_stage(ctx, placement, make_prompts(4), recorder)
    finally:
        ray.shutdown()
    assert all(step["parity/log_prob_max"] < 1e-5 for step in recorder.metrics_rows)
    assert [step["staleness/max"] for step in recorder.metrics_rows] == [0, 1, 1]
    assert recorder.metrics_rows[2]["rollout/delta_max"] > 1e-7, "one step old"
    # Another engine's ratio is against the training policy (``decoupled``), whatever generated.
    assert recorder.metrics_rows[2]["ratio/first_deviation"] < 1e-6
