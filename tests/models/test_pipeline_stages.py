"""A step of an online stage and an update of an offline one, for every family, with a reward that
costs nothing.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from pipeline_cases import NEWEST_FAMILIES_IN_TEST_ALL, SHORT, TINY, few_tokens, prompts

from ebbflow.flow.noise import SampleKeys
from ebbflow.models.base import predict
from ebbflow.models.encoding import build_prompt_lookup
from ebbflow.online.loop import run_online_stage
from ebbflow.online.sample_workers import RolloutWorker
from ebbflow.online.training_worker import TrainingWorker
from ebbflow.online.workers import LocalWorkers, open_local_workers
from ebbflow.recipe import Recipe
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.combine import Scorer
from ebbflow.rollouts.generate import Diffusers, generate_samples
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training.batches import build_forward_batch, count_micro_batches
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater
from tests.glyph_stages import small_stage
from tests.parameters import changed, values

LORA = {"train": "lora", "rank": 4, "alpha": 8}


class Brightness(Reward):
    """Stub reward of images and videos."""

    name = "brightness"

    def __call__(self, images, prompts):
        return RewardResult(images.reshape(len(images), -1).mean(1) / 255, {}, {})


@pytest.fixture
def start(open_tiny):
    """``start("sd3", stage)``: the stage in a recipe of that model, the model, and an updater with
    its policy.
    """

    def begin(name, stage, **config):
        model = open_tiny(name, **few_tokens(name), **config)
        small = {"group_size": 2, "micro_batch": 4, "drift_alarm": 1e9}
        recipe = Recipe.model_validate(
            {
                "model": model.config.model_dump(),
                "policy": LORA,
                "stages": [small_stage(small | stage)],
            }
        )
        ctx = StageContext(recipe, 0, 0)
        policy = Policy(model, recipe.policy, seed=0)
        for name in ctx.following_copies:
            policy.ensure_copy(name)
        return ctx, model, PolicyUpdater(policy, ctx.config)

    return begin


@pytest.mark.parametrize("lr", [0, 1e-3])
@pytest.mark.parametrize(("name", "frames"), [*((name, 1) for name in TINY), ("wan", 5)])
def test_family_trains_an_online_step(start, name, lr, frames):
    online = {
        "kind": "online",
        "algorithm": {"name": "mix_grpo"},
        "steps": 1,
        "prompts_per_step": 2,
        "updates_per_step": 1,
        "sampler": {"steps": 3},
        "window": {"size": 2},
        "reference": {"weight": 0.1},
        "optimizer": {"lr": lr},
    }
    ctx, model, updater = start(name, online, frames=frames)
    assert model.config.guidance > 1
    old_values = values(updater.policy)
    recorder = MetricsRecorder()
    scorer = Scorer(((Brightness(), 1.0),))
    run_online_stage(
        ctx, open_local_workers(ctx, updater, scorer), prompts(name, SHORT[:2]), recorder
    )
    (metrics,) = recorder.metrics_rows
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["reward/std"] > 0
    assert metrics["grad_norm"] > 0
    assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["ratio/deviation"] < 1e-6
    moved = changed(updater.policy, old_values)
    assert moved == set() if lr == 0 else len(moved) > len(old_values) / 3


@pytest.mark.exhaustive
def test_an_online_step_trains_both_experts(start):
    online = {
        "kind": "online",
        "algorithm": {"name": "mix_grpo"},
        "steps": 1,
        "prompts_per_step": 2,
        "updates_per_step": 1,
        "sampler": {"steps": 4},
        "window": {"kind": "all"},
        "optimizer": {"lr": 1e-3},
    }
    ctx, model, updater = start("wan_a14b", online, expert="both", guidance=1.0)
    old_values = values(updater.policy)
    recorder = MetricsRecorder()
    workers = open_local_workers(ctx, updater, Scorer(((Brightness(), 1.0),)))
    run_online_stage(ctx, workers, prompts("wan_a14b", SHORT[:2]), recorder)
    (metrics,) = recorder.metrics_rows
    assert metrics["ratio/deviation"] < 1e-6
    assert {name.split(".")[0] for name in changed(updater.policy, old_values)} == {
        "transformer",
        "transformer_2",
    }


@pytest.mark.parametrize("algorithm", ["mix_grpo", "grpo_guard", "flow_dppo"])
@pytest.mark.parametrize("in_loss", [True, False])
def test_guided_rollouts_can_train_the_prediction_without_guidance(
    start, monkeypatch, algorithm, in_loss
):
    online = {
        "kind": "online",
        "algorithm": {"name": algorithm},
        "guidance_in_loss": in_loss,
        "steps": 1,
        "prompts_per_step": 2,
        "updates_per_step": 1,
        "sampler": {"steps": 3},
        "window": {"kind": "fixed", "size": 2},
        "reference": {"weight": 0.1},
        "optimizer": {"lr": 1e-3},
    }
    ctx, model, updater = start("sd3", online)
    recorder = MetricsRecorder()
    guided = []
    velocity = model.predict_velocity
    old_values = values(updater.policy)

    def watched(latents, sigma, conditioning):
        guided.append(conditioning.negative is not None)
        return velocity(latents, sigma, conditioning)

    monkeypatch.setattr(model, "predict_velocity", watched)
    run_online_stage(
        ctx,
        open_local_workers(ctx, updater, Scorer(((Brightness(), 1.0),))),
        prompts("sd3", SHORT[:2]),
        recorder,
    )
    (metrics,) = recorder.metrics_rows
    assert guided[:3] == [True] * 3
    assert set(guided[3:]) == {in_loss}
    assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["ratio/first_deviation"] < 1e-6
    assert changed(updater.policy, old_values)
    if in_loss:
        assert "rollout/delta_mean" not in metrics
    else:
        assert metrics["rollout/delta_mean"] > 1e-5, (
            "what guidance does to the log-probs is reported"
        )


def test_longer_validation_prompts_are_not_felt(start):
    """Prompts are padded to the longest of those encoded together, which must not be one that is
    only watched.
    """
    online = {
        "kind": "online",
        "steps": 1,
        "prompts_per_step": 2,
        "updates_per_step": 1,
        "sampler": {"steps": 4},
    }
    learnt = []
    for watched in ([], prompts("qwen_image", SHORT[2:])):
        ctx, _, updater = start(
            "qwen_image", online | {"validation": {"prompts": 1}, "optimizer": {"lr": 1e-3}}
        )
        placement = open_local_workers(ctx, updater, Scorer(((Brightness(), 1.0),)))
        training = prompts("qwen_image", SHORT[:2])
        run_online_stage(ctx, placement, training, MetricsRecorder(), validation=watched)
        learnt.append(values(updater.policy))
    assert all(torch.equal(value, learnt[1][name]) for name, value in learnt[0].items())


class Files(MetricsRecorder):
    """A recorder that keeps the files it is shown."""

    keeps_files = True

    def __init__(self):
        super().__init__()
        self.files = {}

    def log_file(self, path, content):
        self.files[path] = content


def test_the_time_of_the_gate_is_told_and_a_profile_is_of_the_rollouts(start, open_tiny):
    """Behind the gate is the reference engine, with weights of its own; of step 0 the gate comes
    first.
    """
    small = {"steps": 1, "prompts_per_step": 2, "sampler": {"steps": 4}, "window": {"size": 2}}
    online = {
        "kind": "online",
        "engine": "vllm_omni",
        "profile": {"steps": [0], "roles": ["rollout"]},
        **small,
    }
    ctx, _, updater = start("sd3", online)
    recorder = Files()
    engine = Diffusers(
        ctx, Policy(open_tiny("sd3", **few_tokens("sd3")), ctx.recipe.policy, seed=0)
    )
    scorer = Scorer(((Brightness(), 1.0),))
    placement = LocalWorkers(TrainingWorker(ctx, updater), scorer, RolloutWorker(engine))
    record = run_online_stage(ctx, placement, prompts("sd3", SHORT[:2]), recorder)
    assert recorder.metrics_rows[0]["parity/log_prob_max"] < 1e-5
    spans = [
        (span["task"], span["step"])
        for span in json.loads(recorder.files["timeline.json"])["spans"]
    ]
    assert spans.index(("parity", 0)) < spans.index(("rollout", 0)) < spans.index(("profile", 0))
    assert record.seconds["parity"] > 0
    assert "profile/step-00000/rollout-0.json.gz" in recorder.files


def test_the_policy_is_pulled_to_the_base_model_as_it_draws_with_guidance(start):
    """By CRD's published defaults. The policy is unguided, and so is the base model that the drift
    is measured from.
    """
    online = {
        "kind": "online",
        "algorithm": {"name": "crd"},
        "sampler": {"steps": 3},
        "reference": {"guidance": 4.5},
    }
    ctx, model, updater = start("sd3", online | {"optimizer": {"lr": 0}}, guidance=1.0)
    wanted = [prompt for prompt in prompts("sd3", SHORT[:2]) for _ in range(2)]
    keys = SampleKeys(ctx.stage_seed, [prompt.prompt_id for prompt in wanted], [0, 1, 0, 1])
    trainer = TrainingWorker(ctx, updater)
    conditioning = trainer.encode(wanted)(wanted)
    clean = torch.randn(4, *model.latent_shape, generator=torch.Generator().manual_seed(0))
    advantage = torch.tensor([5.0, -5.0, 1.0, -1.0])
    groups = np.array([0, 0, 1, 1])
    batch = build_forward_batch(
        clean,
        conditioning,
        advantage,
        keys,
        groups,
        ctx.config.hyper_parameters,
        updater.sampler_sigmas,
        visit=0,
    )
    latents = batch.inputs.latents
    sigma = batch.inputs.sigma
    rows = conditioning.select_rows(batch.inputs.sample_index)
    with torch.no_grad():
        plain, negative = (
            predict(model, latents, sigma, each)
            for each in (rows.without_guidance(), rows.negative)
        )
    apart = ((plain - (negative + 4.5 * (plain - negative))) ** 2).flatten(1).mean(1)
    metrics = updater.update_policy(batch, 2)
    assert metrics["kl/reference"] == pytest.approx(apart.mean().item(), rel=1e-4) != 0
    assert metrics["velocity_drift"] == pytest.approx(0, abs=1e-9)
    assert metrics["crd/implied"] == pytest.approx(0, abs=1e-6)
    share = 1e-4 + (0.1 - 1e-4) * (batch.advantage / 10 + 0.5)
    centred = batch.advantage / 10  # the groups' means are 0
    assert metrics["loss"] == pytest.approx(
        (5 * centred**2 + share * apart).mean().item(), rel=1e-4
    )


def test_a_stage_of_crd_trains_and_generates_without_guidance(start):
    online = {
        "kind": "online",
        "algorithm": {"name": "crd"},
        "steps": 2,
        "prompts_per_step": 2,
        "updates_per_step": 1,
    }
    online |= {
        "sampler": {"steps": 3},
        "optimizer": {"lr": 1e-3},
        "statistics_alarm": 1e9,
        "reference": {"guidance": 4.5},
    }
    ctx, _, updater = start("sd3", online, guidance=1.0)
    old_values = values(updater.policy)
    recorder = MetricsRecorder()
    run_online_stage(
        ctx,
        open_local_workers(ctx, updater, Scorer(((Brightness(), 1.0),))),
        prompts("sd3", SHORT[:2]),
        recorder,
    )
    assert all(
        np.isfinite(value) for metrics in recorder.metrics_rows for value in metrics.values()
    )
    assert all(metrics["kl/reference"] > 0 for metrics in recorder.metrics_rows)
    assert len(changed(updater.policy, old_values)) > len(old_values) / 3
    # On policy for the first 75 steps, while the reference lags behind.
    assert all(
        torch.equal(value, updater.policy.parameters[name])
        for name, value in updater.policy.copies["sampling"].items()
    )
    assert any(
        not torch.equal(value, updater.policy.parameters[name])
        for name, value in updater.policy.copies["old"].items()
    )


@pytest.mark.parametrize("name", NEWEST_FAMILIES_IN_TEST_ALL)
def test_family_trains_an_offline_update(start, name):
    offline = {
        "kind": "offline",
        "algorithm": {"name": "diffusion_nft"},
        "prompts": 2,
        "shards": 1,
        "epochs": 1,
        "batch_size": 4,
        "sampler": {"name": "ode", "steps": 2},
        "optimizer": {"lr": 1e-3},
    }
    ctx, model, updater = start(name, offline)
    wanted = [prompt for prompt in prompts(name, SHORT[:2]) for _ in range(2)]
    keys = SampleKeys(ctx.stage_seed, [prompt.prompt_id for prompt in wanted], [0, 1, 0, 1])
    conditioning = build_prompt_lookup(model, wanted)(wanted)
    clean = generate_samples(model, conditioning, keys, ctx.config.sampler).latents
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.5])
    batch = build_forward_batch(
        clean,
        conditioning,
        advantage,
        keys,
        np.arange(4),
        ctx.config.hyper_parameters,
        updater.sampler_sigmas,
        visit=0,
    )
    assert batch.inputs.conditioning.negative is None
    old_values = values(updater.policy)
    metrics = updater.update_policy(
        batch, count_micro_batches(batch.group_index, ctx.config.micro_batch)
    )
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["grad_norm"] > 0
    assert len(changed(updater.policy, old_values)) > len(old_values) / 3
