"""A few real steps of the hot loop with a reward that costs nothing, with every algorithm."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from loop_cases import NAMES, NFT, keys_of

from ebbflow.algorithms.base import Algorithm, compute_flow_matching_error, select_groups
from ebbflow.models.base import predict
from ebbflow.online import loop, step_advantages
from ebbflow.recipe.algorithms import ForwardConfig
from ebbflow.recipe.registry import ALGORITHMS
from ebbflow.rollouts import generate
from ebbflow.training import passes
from tests.parameters import changed

TRAJECTORY = [name for name, config in ALGORITHMS.items() if config.kind == "trajectory"]
SIMILAR = (
    *("flow_grpo", "flow_grpo_fast", "dance_grpo", "tempflow_grpo", "grpo_guard", "flow_dppo"),
    *("awm", "rwr", "crd", "refl", "tdm"),
)
"""Algorithms with a loss of their own, for whose rows others stand in ``make test``: those select,
group and reshape the samples of a step in the same way.
"""


def mark_repeats(name):
    return [pytest.mark.exhaustive] if name in SIMILAR else []


REPEATED_IN_TEST_ALL = [pytest.param(name, marks=mark_repeats(name)) for name in NAMES]
ON_SAMPLERS = [
    # Each algorithm on one sampler, and each sampler under one algorithm of the kind.
    pytest.param(a, s, marks=mark_repeats(a) if s != "flow_sde" else [])
    for a in TRAJECTORY
    for s in ("flow_sde", "dance_sde", "cps")
    if (a, s) != ("grpo_guard", "cps")
]


class Imitation(ForwardConfig):
    """A user's own algorithm: imitate whole groups."""

    strength: float = 1.0


OWN = Algorithm(
    Imitation,
    lambda rows, config: (
        config.strength * compute_flow_matching_error(rows, rows.velocity),
        {"own/advantage": rows.advantage},
    ),
    select=select_groups,
)


EVERY_STEP = {
    "reward/mean",
    "reward/std",
    "reward/min",
    "reward/max",
    "reward/scored_share",
    "score/darkness",
    "score/brightness",
    "group/size",
    "group/zero_std_share",
    "group/dropped_samples",
    "advantage/mean",
    "advantage/std",
    "advantage/max_magnitude",
    "loss",
    "grad_norm",
    "lr",
    "updates",
    "velocity_drift",
    "alarm/velocity_drift",
    "seconds/rollout",
    "seconds/scoring",
    "seconds/training",
    "ms_per_image/rollout",
    "ms_per_image/scoring",
    "ms_per_image/training",
    "images_per_second",
    "utilisation/rollout",
    "utilisation/reward",
    "utilisation/training",
}
PPO = {"clip/up", "clip/down"}
RATIO = {"ratio/mean", "ratio/deviation", "kl/old"}
MATCHING = {"matching/distance", "matching/gradient", "fake/loss", "fake/grad_norm"}
ITS_OWN = {
    "flow_grpo": PPO | RATIO | {"kl/reference"},
    "flow_grpo_fast": PPO | RATIO,
    "mix_grpo": PPO | RATIO | {"kl/reference"},
    "dance_grpo": PPO | RATIO,
    "branch_grpo": PPO | RATIO,
    "tempflow_grpo": PPO | RATIO | {"kl/reference", "tempflow/weight"},
    "gardo": PPO
    | RATIO
    | {"kl/reference", "reference/reset", "gardo/share", "gardo/gated_share", "gardo/diversity"},
    "grpo_guard": PPO | RATIO | {"guard/bias", "guard/ratio_deviation"},
    "flow_dppo": RATIO | {"dppo/divergence", "dppo/dropped"},
    "distillation": RATIO | {"kl/teacher"},
    "diffusion_nft": {"nft/better_error", "nft/worse_error", "nft/old_deviation", "kl/reference"},
    "awm": PPO | {"awm/error", "awm/old_deviation", "awm/ratio", "kl/reference"},
    "diffusion_dpo": {"dpo/margin", "dpo/accuracy", "dpo/better_change", "dpo/worse_change"},
    "dgpo": {"dgpo/weight", "dgpo/change"},
    "crd": {"crd/implied", "crd/miss", "crd/agreement", "kl/reference"},
    "sft": set(),
    "rwr": {"rwr/weight"},
    "refl": {"refl/reward", "refl/active"},
    "draft": {"draft/reward"},
    "srpo": {"srpo/reward", "srpo/margin", "srpo/active"},
    "dmd2": MATCHING,
    "tdm": MATCHING,
    "tdm_r1": MATCHING
    | {"matching/reward_gradient", "surrogate/loss", "surrogate/grad_norm"}
    | {f"surrogate/{name}" for name in ("weight", "change", "distance", "clipped", "stopped")},
}


@pytest.mark.parametrize(
    ("name", "policy_config"),
    [
        *(pytest.param(name, {}, id=f"{name}-full") for name in NAMES),
        *(
            pytest.param(
                name,
                {"train": "lora", "rank": 4, "alpha": 8},
                id=f"{name}-lora",
                marks=mark_repeats(name),
            )
            for name in NAMES
        ),
    ],
)
def test_steps_change_the_policy_and_say_everything(run, name, policy_config):
    policy, before, logged, record = run(
        policy_config=policy_config,
        algorithm=keys_of(name),
        steps=2,
        updates_per_step=2,
        micro_batch=4,
    )
    assert changed(policy, before)
    assert all(torch.equal(value, before[key]) for key, value in policy.copies["reference"].items())
    assert len(logged) == 2
    for metrics in logged:
        assert metrics.keys() >= EVERY_STEP | ITS_OWN[name]
        assert not (PPO | RATIO | {"kl/reference"}) - ITS_OWN[name] & metrics.keys()
        assert all(np.isfinite(value) for value in metrics.values())
        assert metrics["grad_norm"] > 0
        assert metrics["score/darkness"] == pytest.approx(metrics["reward/mean"])
        assert metrics["score/brightness"] == pytest.approx(1 - metrics["reward/mean"])
    assert [metrics["updates"] for metrics in logged] == [2, 4]
    assert (record.label, record.samples, record.optimizer_steps, record.algorithm) == (
        "1.1 online",
        16,
        4,
        name,
    )
    assert record.alarms == []
    assert record.seconds.pop("encoding") > 0
    assert record.seconds == pytest.approx(
        {
            phase: sum(metrics[f"seconds/{phase}"] for metrics in logged)
            for phase in ("rollout", "scoring", "training")
        }
    )


@pytest.mark.parametrize("name", REPEATED_IN_TEST_ALL)
def test_micro_batches_do_not_change_a_step(run, name):
    """Smaller than a group, not a divisor of anything, and everything at once; pairs and groups
    stay whole.
    """
    steps = {}
    for size in (64, 3, 1):
        policy, before, logged, _ = run(
            algorithm=keys_of(name), sgd=0.05, steps=1, micro_batch=size
        )
        steps[size] = torch.cat(
            [(policy.parameters[key] - before[key]).flatten() for key in before]
        )
        assert ("grad_variance" in logged[0]) == (size < 64)
    assert steps[64].norm() > 0
    for size in (3, 1):
        assert (steps[size] - steps[64]).norm() < 1e-3 * steps[64].norm()


@pytest.mark.parametrize("name", ["mix_grpo", "diffusion_nft"])
def test_passes_of_rollouts_and_updates_are_equal(run, monkeypatch, name):
    """Groups of 6 in micro-batches of 4 are passes of 3 and 3, not of 4 and 2."""
    sizes = {generate: set(), passes: set()}

    def record_rows(module, predict=predict):
        def predict_and_record(model, latents, *arguments, **keys):
            sizes[module].add(len(latents))
            return predict(model, latents, *arguments, **keys)

        monkeypatch.setattr(module, "predict", predict_and_record)

    record_rows(generate)
    record_rows(passes)
    _, _, logged, _ = run(
        algorithm=keys_of(name), steps=1, prompts_per_step=2, group_size=6, micro_batch=4
    )
    assert sizes == {generate: {3}, passes: {3}}
    assert logged[0].get("ratio/first_deviation", 0) == 0


def test_a_users_own_algorithm_trains(run):
    own = {
        "name": "custom",
        "path": f"{__name__}:OWN",
        "options": {"strength": 0.5, "noise_levels": 1},
    }
    policy, before, logged, record = run(algorithm=own, window=None, steps=1)
    assert changed(policy, before)
    assert logged[0]["own/advantage"] == pytest.approx(logged[0]["advantage/mean"], abs=1e-6)
    assert record.algorithm == f"{__name__}:OWN"


@pytest.mark.parametrize(("name", "sampler"), ON_SAMPLERS)
def test_without_a_learning_rate_nothing_changes_and_the_ratio_stays_one(run, name, sampler):
    policy, before, logged, _ = run(
        algorithm=keys_of(name),
        steps=2,
        updates_per_step=2,
        prompts_per_step=1,
        reference={"weight": 0.1},
        sampler={"name": sampler, "steps": 4},
        optimizer={"lr": 0, "weight_decay": 0.1},
    )
    assert not changed(policy, before)
    for metrics in logged:
        assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-6)
        assert metrics["ratio/deviation"] < 1e-6
        assert metrics["kl/reference"] == pytest.approx(0, abs=1e-9)
        assert metrics["grad_norm"] > 0


@pytest.mark.parametrize("name", TRAJECTORY)
def test_the_first_update_of_every_step_has_ratio_one(run, name):
    for metrics in run(
        algorithm=keys_of(name), steps=3, updates_per_step=1, optimizer={"lr": 1e-3}
    )[2]:
        assert metrics["ratio/deviation"] < 1e-6


def test_the_second_update_of_a_step_has_not(run):
    assert run(steps=1, updates_per_step=2, optimizer={"lr": 1e-3})[2][0]["ratio/deviation"] > 1e-6


def test_the_same_stage_twice_gives_the_same_bits(run):
    (one, _, first, _), (other, _, second, _) = (run(steps=2) for _ in range(2))
    assert all(torch.equal(value, other.parameters[name]) for name, value in one.parameters.items())

    def repeatable(metrics):
        timed = ("seconds", "ms_per", "images_per", "push", "utilisation")
        return {name: value for name, value in metrics.items() if not name.startswith(timed)}

    assert [repeatable(metrics) for metrics in first] == [repeatable(metrics) for metrics in second]


def test_reward_rises_on_an_easy_task(run):
    """Darkness is easy: eight steps on the same prompts make the images darker."""
    logged = run(
        **{**NFT, "algorithm": {"name": "diffusion_nft", "old": {"max_decay": 0}}},
        steps=8,
        prompts_per_step=6,
        updates_per_step=1,
        optimizer={"lr": 1e-3},
    )[2]
    rewards = [metrics["reward/mean"] for metrics in logged]
    spread = logged[0]["reward/std"] / 24**0.5
    assert np.mean(rewards[-2:]) > rewards[0] + 4 * spread


def test_the_old_policy_follows_with_its_decay(run):
    # Decay 0 copies: after every update the old policy is the current one.
    copying = {**NFT, "algorithm": {"name": "diffusion_nft", "old": {"max_decay": 0}}}
    policy, before, logged, _ = run(**copying, steps=2)
    assert changed(policy, before)
    assert all(
        torch.equal(value, policy.parameters[name]) for name, value in policy.copies["old"].items()
    )
    assert all(metrics["nft/old_deviation"] == pytest.approx(0, abs=1e-10) for metrics in logged)
    # Decay .9 lags behind.
    lagging = {**NFT, "algorithm": {"name": "diffusion_nft", "old": {"slope": 0.9}}}
    policy, before, _, _ = run(**lagging, steps=1, updates_per_step=1)
    for name, value in policy.copies["old"].items():
        assert torch.allclose(value, 0.9 * before[name] + 0.1 * policy.parameters[name], atol=1e-6)


# Rough rollouts: another precision than the training's.

BYPASS = {"mode": "bypass", "weights": "none"}


@pytest.mark.parametrize("name", ["mix_grpo", "grpo_guard", "flow_dppo"])
def test_a_correction_brings_the_first_ratio_back_to_one(run, name):
    rough = {
        "algorithm": {"name": name},
        "rollout_precision": "bfloat16",
        "steps": 1,
        "updates_per_step": 1,
    }
    plain, bypassed, decoupled = (
        run(**rough, correction=correction)[2][0] for correction in (None, BYPASS, {})
    )
    assert plain["rollout/delta_mean"] == bypassed["rollout/delta_mean"], (
        "rollouts in another precision are always watched"
    )
    assert decoupled["ratio/deviation"] < 1e-6 < bypassed["ratio/deviation"]
    assert bypassed["ratio/deviation"] == pytest.approx(plain["ratio/deviation"], rel=1e-3)
    for metrics in (bypassed, decoupled):
        assert metrics["rollout/delta_max"] >= metrics["rollout/delta_mean"] > 1e-6


def test_exact_rollouts_need_no_correction(run):
    (plain, *_), (apply_rollout_correction, _, (metrics,), _) = (
        run(steps=1, sgd=0.1, correction=correction) for correction in (None, {})
    )
    assert metrics["rollout/delta_max"] < 1e-6
    assert metrics["ratio/deviation"] < 1e-6
    for key, value in plain.parameters.items():
        assert torch.allclose(value, apply_rollout_correction.parameters[key], atol=1e-6)


def test_updates_with_nothing_left_are_not_taken(run):
    policy, before, logged, record = run(
        rollout_precision="bfloat16",
        steps=1,
        correction={"weights": "none", "reject": "k1", "reject_above": 1e-12},
    )
    assert logged[0]["rollout/rejected"] == 1
    assert record.optimizer_steps == 0
    assert not changed(policy, before)


# What a stage tells and leaves behind.


def test_the_drift_alarm_stands_in_the_record(run):
    with pytest.warns(UserWarning, match="velocity drift") as warned:
        logged, record = run(steps=3, updates_per_step=1, optimizer={"lr": 1e-3}, drift_alarm=1e-9)[
            2:
        ]
    assert len(warned) == 1
    assert len(record.alarms) == 1
    assert record.alarms[0].startswith("velocity drift ")
    assert [metrics["alarm/velocity_drift"] for metrics in logged] == [0, 1, 1]


def test_the_reference_engine_is_not_compared_with_itself(run, monkeypatch):
    async def fail(*arguments):
        raise AssertionError("the gate looked at the reference engine")

    monkeypatch.setattr(loop, "check_parity", fail)
    run(steps=1)


def test_statistics_of_the_prompts_run_over_the_steps_of_a_stage(run, monkeypatch):
    seen = []
    compute = step_advantages.compute_advantages

    def watch(scores, weights, prompt_ids, config, history, scored):
        seen.append(history)
        return compute(scores, weights, prompt_ids, config, history, scored)

    monkeypatch.setattr(step_advantages, "compute_advantages", watch)
    run(steps=3, prompts_per_step=6, advantages={"running": True})
    assert seen[0] is seen[1] is seen[2]
    assert {count for _, count, *_ in seen[0].state_dict()["darkness"]} == {12}
