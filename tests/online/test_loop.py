"""A few real steps of the hot loop with a reward that costs nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ebbflow.models import load_model
from ebbflow.online import loop
from ebbflow.online.loop import collect, run_online_stage
from ebbflow.rewards.combine import RewardError
from ebbflow.rollouts.generate import generate
from ebbflow.stage import Place
from ebbflow.timing import Clock
from ebbflow.training.policy import Policy

NFT = {
    "algorithm": {"name": "diffusion_nft", "old_policy_decay_steps": 2},
    "sampler": {"name": "ode", "steps": 3},
    "window": None,
}


@pytest.fixture
def run(make_recipe, make_prompts, base_folder, scorer):
    """Run an online stage; returns (policy, its parameters before, logged metrics, record)."""

    def stage(prompts=None, judge=scorer, policy_config=None, **online):
        recipe = make_recipe(online=online, policy=policy_config or {})
        place, model, logged = Place(recipe, 0, 0), load_model(base_folder), []
        policy = Policy(model, recipe.policy, 0)
        if place.algorithm.old_decay:
            policy.ensure("old")
        before = {name: value.detach().clone() for name, value in policy.parameters.items()}

        def log(metrics, step):
            assert step == len(logged)
            logged.append(metrics)

        record = run_online_stage(place, model, policy, judge, prompts or make_prompts(6), log)
        return policy, before, logged, record

    return stage


def changed(policy, before):
    return any(not torch.equal(value, before[name]) for name, value in policy.parameters.items())


EVERY_STEP = {
    "reward/mean", "reward/std", "reward/min", "reward/max", "reward/scored_share", "score/darkness", "score/brightness",
    "group/size", "group/zero_std_share", "group/dropped_samples", "advantage/mean", "advantage/std", "advantage/max_magnitude",
    "loss", "grad_norm", "grad_variance", "lr", "updates", "velocity_drift", "kl/reference",
    "seconds/rollout", "seconds/scoring", "seconds/training",
    "ms_per_image/rollout", "ms_per_image/scoring", "ms_per_image/training", "images_per_second",
}  # fmt: skip
OF_FLOW_GRPO = {"ratio/mean", "ratio/deviation", "clip/up", "clip/down", "kl/old"}
OF_NFT = {"nft/better_error", "nft/worse_error", "nft/old_deviation"}


@pytest.mark.parametrize("policy_config", [{}, {"train": "lora", "rank": 4, "alpha": 8}], ids=["full", "lora"])
@pytest.mark.parametrize(("online", "names"), [({}, OF_FLOW_GRPO), (NFT, OF_NFT)], ids=["flow_grpo", "diffusion_nft"])
def test_steps_change_the_policy_and_say_everything(run, online, names, policy_config):
    policy, before, logged, record = run(policy_config=policy_config, **online, steps=3, updates_per_step=2, micro_batch=4)
    assert changed(policy, before)
    assert all(torch.equal(value, before[name]) for name, value in policy.copies["reference"].items())
    assert len(logged) == 3
    for metrics in logged:
        assert metrics.keys() >= EVERY_STEP | names
        assert all(np.isfinite(value) for value in metrics.values())
        assert metrics["score/darkness"] == pytest.approx(metrics["reward/mean"])
        assert metrics["score/brightness"] == pytest.approx(1 - metrics["reward/mean"])
    assert [metrics["updates"] for metrics in logged] == [2, 4, 6]
    assert (record.label, record.samples, record.optimizer_steps) == ("1.1 online", 24, 6)
    assert record.algorithm == policy_algorithm(names)
    assert record.seconds == pytest.approx(
        {phase: sum(metrics[f"seconds/{phase}"] for metrics in logged) for phase in ("rollout", "scoring", "training")}
    )


def policy_algorithm(names):
    return "flow_grpo" if names is OF_FLOW_GRPO else "diffusion_nft"


def test_without_a_learning_rate_nothing_changes_and_the_ratio_stays_one(run):
    for sampler in ("flow_sde", "dance_sde", "cps"):
        policy, before, logged, _ = run(
            steps=3, updates_per_step=2, sampler={"name": sampler, "steps": 4}, optimizer={"lr": 0, "weight_decay": 0.1}
        )
        assert not changed(policy, before)
        for metrics in logged:
            assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-6)
            assert metrics["ratio/deviation"] < 1e-6
            assert metrics["kl/reference"] == pytest.approx(0, abs=1e-9)
            assert metrics["grad_norm"] > 0


def test_the_first_update_of_every_step_has_ratio_one(run):
    for metrics in run(steps=3, updates_per_step=1, optimizer={"lr": 1e-3})[2]:
        assert metrics["ratio/deviation"] < 1e-6
    later = run(steps=1, updates_per_step=2, optimizer={"lr": 1e-3})[2][0]
    assert later["ratio/deviation"] > 1e-6


def test_the_same_stage_twice_gives_the_same_bits(run):
    (one, _, first, _), (other, _, second, _) = (run(steps=2) for _ in range(2))
    assert all(torch.equal(value, other.parameters[name]) for name, value in one.parameters.items())

    def repeatable(metrics):
        return {name: value for name, value in metrics.items() if not name.startswith(("seconds", "ms_per", "images_per"))}

    assert [repeatable(metrics) for metrics in first] == [repeatable(metrics) for metrics in second]


def test_the_reward_rises(run):
    """Darkness is easy: eight steps on the same two prompts make the images darker."""
    logged = run(
        **{**NFT, "algorithm": {"name": "diffusion_nft", "beta": 0.1, "old_policy_decay": 0}},
        steps=8, prompts_per_step=6, updates_per_step=1, optimizer={"lr": 1e-3},
    )[2]  # fmt: skip
    rewards = [metrics["reward/mean"] for metrics in logged]
    spread = logged[0]["reward/std"] / 24**0.5
    assert np.mean(rewards[-2:]) > rewards[0] + 4 * spread


def test_the_old_policy_follows_with_its_decay(run):
    # Decay 0 copies: after every update the old policy is the current one.
    copying = {**NFT, "algorithm": {"name": "diffusion_nft", "old_policy_decay": 0}}
    policy, before, logged, _ = run(**copying, steps=2)
    assert changed(policy, before)
    assert all(torch.equal(value, policy.parameters[name]) for name, value in policy.copies["old"].items())
    assert all(metrics["nft/old_deviation"] == pytest.approx(0, abs=1e-10) for metrics in logged)
    # Decay .9 lags behind.
    lagging = {**NFT, "algorithm": {"name": "diffusion_nft", "old_policy_decay": 0.9, "old_policy_decay_steps": 0}}
    policy, before, _, _ = run(**lagging, steps=1, updates_per_step=1)
    for name, value in policy.copies["old"].items():
        assert torch.allclose(value, 0.9 * before[name] + 0.1 * policy.parameters[name], atol=1e-6)


def test_the_reward_steers(run, scorer):
    """The same stage with the reward turned round moves the parameters the other way, on the whole."""
    from ebbflow.rewards.combine import Scorer

    class Turned:
        name = "darkness"

        def unavailable(self):
            return None

        def __call__(self, images, prompts):
            result = scorer.terms[0][0](images, prompts)
            return type(result)(-result.values, {}, {})

    config = {"steps": 1, "updates_per_step": 1, "algorithm": {"name": "flow_grpo", "reference_weight": 0}}
    policy, before, _, _ = run(**config)
    turned, _, _, _ = run(judge=Scorer(((Turned(), 1.0),)), **config)
    moves = [torch.cat([(p.parameters[n] - before[n]).flatten() for n in before]) for p in (policy, turned)]
    assert torch.cosine_similarity(*moves, dim=0) < -0.99


def test_failed_samples_are_masked_and_too_many_stop_the_stage(run, make_prompts):
    broken = [type(p)(**{**vars(p), "target": "FAIL"}) if p.prompt_id == 0 else p for p in make_prompts(2)]
    with pytest.raises(RewardError, match=r"4 of 8 images.*max_failed_share"):
        run(prompts=broken)


def test_groups_that_say_nothing_train_nothing(run, scorer):
    """A reward that gives everyone the same: no update, no crash, and the metrics say why."""
    from ebbflow.rewards.combine import Scorer

    class Flat:
        name = "flat"

        def unavailable(self):
            return None

        def __call__(self, images, prompts):
            return type(scorer.terms[0][0](images, prompts))(np.full(len(images), 0.5))

    policy, before, logged, record = run(judge=Scorer(((Flat(), 1.0),)))
    assert not changed(policy, before)
    assert record.optimizer_steps == 0
    for metrics in logged:
        assert metrics["group/zero_std_share"] == 1
        assert metrics["group/dropped_samples"] == 8
        assert metrics["updates"] == 0
        assert "loss" not in metrics


def test_a_step_collects_whole_groups_with_new_noise(make_recipe, make_prompts, model, scorer):
    place = Place(make_recipe(), 0, 0)
    policy = Policy(model, place.recipe.policy, 0)
    first, second = (collect(place, model, policy, scorer, make_prompts(2), step, Clock()) for step in (0, 1))
    for experience in (first, second):
        assert len(experience.keys) == 8
        assert len(set(experience.keys.prompt_ids)) == 2
        assert all(list(experience.keys.prompt_ids).count(prompt_id) == 4 for prompt_id in experience.keys.prompt_ids)
        images = model.decode(experience.rollouts.latents)
        assert images.shape == (8, 16, 32, 3)
        assert experience.scores.reward == pytest.approx(1 - images.mean((1, 2, 3)) / 255)
    pairs = [set(zip(e.keys.prompt_ids, e.keys.samples, strict=True)) for e in (first, second)]
    assert len(pairs[0] | pairs[1]) == 16
    assert first.rollouts.trajectory.steps.tolist() == [0, 1]
    assert second.rollouts.trajectory.steps.tolist() == [1, 2]
    again = generate(model, first.conditioning, first.keys, place.config.sampler, range(2), place.config.micro_batch)
    assert torch.equal(again.latents, first.rollouts.latents)


def test_the_old_policy_generates_where_there_is_one(make_recipe, make_prompts, model, scorer):
    for algorithm, same in ((NFT, True), ({}, False)):
        place = Place(make_recipe(online=algorithm), 0, 0)
        policy = Policy(model, place.recipe.policy, 0)
        policy.ensure("old")
        before = collect(place, model, policy, scorer, make_prompts(6), 0, Clock()).rollouts.latents
        with torch.no_grad():
            for parameter in policy.parameters.values():
                parameter += 0.02
        after = collect(place, model, policy, scorer, make_prompts(6), 0, Clock()).rollouts.latents
        assert torch.equal(before, after) == same


def test_the_updates_of_a_step_share_out_its_samples_mixed(run, monkeypatch):
    parts = []

    def watch(policy, optimizer, algorithm, hyper, batch, *rest):
        prompts = [tuple(row.tolist()) for row in batch.points.conditioning.pooled]
        parts.append(({tuple(row.flatten().tolist()) for row in batch.clean}, set(prompts)))
        return {"loss": 0.0}

    monkeypatch.setattr(loop, "optimise", watch)
    run(**NFT, steps=1, updates_per_step=1)
    run(**NFT, steps=1, updates_per_step=2)
    (whole, prompts), *halves = parts
    assert [len(samples) for samples, _ in halves] == [4, 4]
    assert halves[0][0] | halves[1][0] == whole
    assert halves[0][1] == halves[1][1] == prompts
    assert len(prompts) == 2
