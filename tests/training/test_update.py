"""One optimiser step: what it computes does not depend on how the work is dealt out, and it never
goes through on nonsense.
"""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from training_cases import (
    ALONE,
    FULL,
    LORA,
    NFT,
    UNITS,
    farthest,
    forward_rows,
    samples,
    sgd,
    stage_of,
    trajectory_rows,
    updater_of,
)

from ebbflow.algorithms.base import compute_flow_matching_error, expand_like
from ebbflow.algorithms.built_in import awm, diffusion_nft
from ebbflow.models import load_model
from ebbflow.models.base import predict
from ebbflow.recipe.students import teacher_copy_name
from ebbflow.training.batches import ForwardBatch, ForwardInputs, build_forward_batch
from ebbflow.training.optimizer import build_optimizer
from ebbflow.training.passes import TrainingError
from ebbflow.training.update import PolicyUpdater
from tests.parameters import move, moved, same, values


@pytest.mark.parametrize("algorithm", UNITS)
def test_micro_batches_do_not_change_the_step(base_folder, algorithm):
    """Nor do they tear pairs and groups apart: a part of a group would have another loss."""
    results = []
    for passes in (1, 2, 3):
        updater = updater_of(load_model(base_folder), algorithm, lr=1e-2, reference={"weight": 0.1})
        move(updater.policy)
        start = values(updater.policy)
        batch = forward_rows(updater.policy.model, updater.stage, UNITS[algorithm])
        metrics = [updater.update_policy(batch, passes) for _ in range(2)]
        assert farthest(start, values(updater.policy)) > 1e-4
        results.append((values(updater.policy), metrics))
    for after, metrics in results[1:]:
        assert farthest(after, results[0][0]) < 1e-5
        for found, expected in zip(metrics, results[0][1], strict=True):
            assert found.pop("grad_variance")
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_metrics_are_means_over_the_terms(model):
    updater = updater_of(model, NFT, reference={"weight": 0.1})
    updater.optimizer = build_optimizer(
        updater.policy, updater.stage.optimizer.model_copy(update={"lr": 1e-4})
    )
    batch = forward_rows(model, updater.stage)
    with torch.no_grad():
        velocity = model.predict_velocity(
            batch.inputs.latents, batch.inputs.sigma, batch.inputs.conditioning
        )
        loss, expected = diffusion_nft.compute_loss(
            batch.build_rows(slice(0, 6), velocity, {"old": velocity}), updater.hyper
        )
    metrics = updater.update_policy(batch, 4)
    assert metrics["loss"] == pytest.approx(loss.mean().item(), rel=1e-5)
    assert metrics["nft/better_error"] == pytest.approx(
        expected["nft/better_error"].mean().item(), rel=1e-5
    )
    assert metrics["velocity_drift"] == pytest.approx(0, abs=1e-10)
    assert metrics["lr"] == 1e-4
    assert {
        "loss",
        "grad_norm",
        "grad_variance",
        "kl/reference",
        "nft/old_deviation",
        "nft/worse_error",
    } <= metrics.keys()
    assert updater.updates == 1


# The reference penalty stands beside the algorithm and is the same for all of them.


def penalty_by_hand(penalty, policy, batch):
    """The mean penalty of a trajectory batch, from what both policies predict."""

    @torch.no_grad()
    def predicted():
        velocity = policy.model.predict_velocity(*batch.inputs.model_arguments(slice(None)))
        return velocity, batch.compute_transition(slice(None), velocity)

    velocity, step = predicted()
    with policy.use_copy("reference"):
        base_velocity, base = predicted()
    if penalty == "velocity":
        return ((velocity - base_velocity) ** 2).mean().item()
    scale = step.std if penalty == "kl" else step.scale
    return (((step.mean - base.mean) / expand_like(scale, step.mean)) ** 2).mean().item() / 2


@pytest.mark.parametrize("penalty", ["kl", "kl_without_dt", "velocity"])
def test_the_reference_penalty_is_added_with_its_weight(model, penalty):
    updater = updater_of(model, "mix_grpo", lr=0, reference={"weight": 5, "penalty": penalty})
    policy = updater.policy
    batch = trajectory_rows(model, updater.stage)
    move(policy, 0.005)
    without = PolicyUpdater(
        policy, stage_of("mix_grpo", reference={"weight": 0}), optimizer=sgd(policy, 0)
    ).update_policy(batch, 2)
    metrics = updater.update_policy(batch, 2)
    expected = penalty_by_hand(penalty, policy, batch)
    assert expected > 1e-6
    assert metrics["kl/reference"] == pytest.approx(expected, rel=1e-4)
    assert metrics["loss"] - without["loss"] == pytest.approx(5 * expected, rel=1e-3)
    assert metrics["grad_norm"] != pytest.approx(without["grad_norm"], rel=1e-4)
    assert "kl/reference" not in without


def test_a_reference_under_guidance_needs_negative_prompts(model):
    updater = updater_of(model, NFT, reference={"weight": 0.1, "guidance": 2})
    with pytest.raises(ValueError, match="guidance = 2 needs negative prompts"):
        updater.update_policy(forward_rows(model, updater.stage), 1)


def test_an_adaptive_penalty_weighs_rows_by_their_advantage_and_the_clip(base_folder):
    """At one row of each advantage, of which the largest possible one is 4 here."""
    losses = {}
    for name, reference in {
        "none": {"weight": 0},
        "same": {"weight": 1},
        "adaptive": {"weight": 1, "adaptive": True},
    }.items():
        model = load_model(base_folder)
        updater = updater_of(model, "rwr", lr=0, reference=reference, advantages={"clip": 4})
        move(updater.policy)
        batch = forward_rows(model, stage_of(NFT))
        losses[name] = [updater.update_policy(one_row(batch, row), 1)["loss"] for row in range(6)]
    penalties = np.subtract(losses["same"], losses["none"])
    shares = np.subtract(losses["adaptive"], losses["none"]) / penalties
    advantage = np.array([2.0, -1.0, -1.5, 1.0, -2.0, 3.0])
    assert (penalties > 1e-3).all()
    assert shares == pytest.approx(1e-4 + (1 - 1e-4) * (advantage / 8 + 0.5), rel=1e-2)


def one_row(batch, row):
    part = slice(row, row + 1)
    inputs = ForwardInputs(
        batch.inputs.latents[part],
        batch.inputs.sigma[part],
        batch.inputs.conditioning,
        batch.inputs.sample_index[part],
    )
    values = {
        name: getattr(batch, name)[part]
        for name in ("weight", "group_index", "clean", "noise", "advantage")
    }
    return ForwardBatch(inputs=inputs, keys=batch.keys.select_samples(part), **values)


@pytest.mark.parametrize("share", [0.25, 4.0])
def test_the_gradient_is_clipped_to_its_norm_and_never_scaled_up(model, share):
    still = updater_of(model, NFT, lr=0)
    norm = still.update_policy(forward_rows(model, still.stage), 2)["grad_norm"]
    updater = updater_of(model, NFT, lr=1, optimizer={"max_grad_norm": share * norm})
    before = values(updater.policy)
    metrics = updater.update_policy(forward_rows(model, updater.stage), 2)
    moved = (
        sum(
            ((value - before[name]) ** 2).sum() for name, value in updater.policy.parameters.items()
        )
        ** 0.5
    )
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert moved.item() == pytest.approx(min(1, share) * norm, rel=1e-3)


AWM = {"name": "awm", "noise_levels": 2, "old_weight": 0, "clip_range": 1e9}


def surrogates(updater, batch):
    """s of every row under the policy as it is."""
    with torch.no_grad():
        velocity = predict(updater.policy.model, *batch.inputs.model_arguments(slice(None)))
    rows = batch.build_rows(slice(None), velocity, {"rollout": velocity})
    return awm.compute_surrogate(
        compute_flow_matching_error(rows, velocity), rows.sigma, updater.hyper
    )


@pytest.mark.parametrize(("config", "lr"), [(FULL, 0.5), (LORA, 20.0)], ids=["full", "lora"])
def test_the_ratio_of_a_later_update_is_against_the_policy_that_made_the_rollouts(
    model, config, lr
):
    updater = updater_of(model, AWM, config, lr, reference={"weight": 0})
    batch = forward_rows(model, updater.stage)
    start = surrogates(updater, batch)
    assert updater.update_policy(batch, 2)["awm/ratio"] == 1
    for _ in range(2):
        expected = (surrogates(updater, batch) - start).exp()
        assert (expected - 1).abs().max() > 1e-4
        assert updater.update_policy(batch, 2)["awm/ratio"] == pytest.approx(
            expected.mean().item(), abs=1e-5
        )
    updater.start_rollout()
    assert updater.update_policy(batch, 2)["awm/ratio"] == 1


@pytest.mark.parametrize("clip", [10.0, 2.0])
@pytest.mark.parametrize("algorithm", ["awm", "diffusion_nft"])
def test_losses_are_shares_of_the_largest_advantage(model, algorithm, clip):
    """With ``advantages.clip`` the advantages are scaled here, so that their shares of it stay, and
    NFT's factor is the clip.
    """
    clean, conditioning, advantage, keys = samples(model)

    def loss(clip):
        config = {"name": algorithm, "noise_levels": 1}
        updater = updater_of(
            model, config, lr=0, advantages={"clip": clip}, reference={"weight": 0}
        )
        scaled = advantage * clip / 5
        rows = build_forward_batch(
            clean, conditioning, scaled, keys, ALONE, updater.hyper, updater.sampler_sigmas, visit=0
        )
        return updater.update_policy(rows, 2)["loss"]

    factor = clip / 5 if algorithm == "diffusion_nft" else 1
    assert loss(clip) == pytest.approx(factor * loss(5.0), rel=1e-4)


# Trajectories: what was rolled out is what is trained on.

TRAJECTORY = [
    "flow_grpo",
    "flow_grpo_fast",
    "mix_grpo",
    "dance_grpo",
    "grpo_guard",
    "flow_dppo",
    "distillation",
]
ON_SAMPLERS = [
    (a, s)
    for a in TRAJECTORY
    for s in ("flow_sde", "dance_sde", "cps")
    if (a, s) != ("grpo_guard", "cps")
]


def keys_of(name):
    return {"name": name} | ({"teacher": "t"} if name == "distillation" else {})


@pytest.mark.parametrize(("algorithm", "sampler"), ON_SAMPLERS)
def test_the_first_ratio_after_a_rollout_is_one(model, algorithm, sampler):
    updater = updater_of(
        model, keys_of(algorithm), sampler={"name": sampler, "steps": 5}, reference={"weight": 0.1}
    )
    move(updater.policy)
    metrics = updater.update_policy(trajectory_rows(model, updater.stage, (0, 1, 3)), 3)
    assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["ratio/deviation"] < 1e-6
    assert metrics["kl/old"] == pytest.approx(0, abs=1e-9)
    assert metrics["kl/reference"] > 1e-6


@pytest.mark.parametrize("config", [FULL, LORA], ids=["full", "lora"])
def test_the_ratio_leaves_one_with_the_first_update(model, config):
    updater = updater_of(model, "mix_grpo", config, lr=1.0)
    batch = trajectory_rows(model, updater.stage)
    assert updater.update_policy(batch, 2)["ratio/deviation"] < 1e-6
    assert updater.update_policy(batch, 2)["ratio/deviation"] > 1e-6


@pytest.mark.parametrize("algorithm", TRAJECTORY)
def test_without_a_learning_rate_the_ratio_stays_one(model, algorithm):
    updater = updater_of(model, keys_of(algorithm))
    before = values(updater.policy)
    updater.policy.copies["teacher"] = moved(updater.policy)
    updater.optimizer = build_optimizer(
        updater.policy, updater.stage.optimizer.model_copy(update={"lr": 0.0})
    )
    batch = trajectory_rows(model, updater.stage)
    for passes in (1, 2, 3, 2):
        metrics = updater.update_policy(batch, passes)
        assert metrics["ratio/deviation"] < 1e-6
        assert metrics["velocity_drift"] == pytest.approx(0, abs=1e-10)
        assert metrics["grad_norm"] > 0
    assert same(values(updater.policy), before)


def test_a_policy_that_is_its_teacher_has_nothing_to_learn(model):
    updater = updater_of(model, keys_of("distillation"))
    metrics = updater.update_policy(trajectory_rows(model, updater.stage), 2)
    assert metrics["loss"] == pytest.approx(0, abs=1e-12)
    assert metrics["kl/teacher"] == pytest.approx(0, abs=1e-12)


def test_a_policy_comes_closer_to_its_teacher(model):
    updater = updater_of(model, keys_of("distillation"), lr=3.0)
    updater.policy.copies["teacher"] = moved(updater.policy, 0.01)
    batch = trajectory_rows(model, updater.stage)
    losses = [updater.update_policy(batch, 1)["loss"] for _ in range(10)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * losses[0]


@pytest.fixture
def taught(model):
    """(a distillation with a teacher for each of two prompt sets, its rows, the set of each of six
    prompts).
    """
    algorithm = {"name": "distillation", "teachers": {"a": "x", "b c": "y"}}
    updater = updater_of(model, algorithm, lr=0)
    for seed, name in enumerate(("a", "b c")):
        updater.policy.copies[teacher_copy_name(name)] = moved(updater.policy, 0.01, seed)
    return (
        updater,
        trajectory_rows(model, updater.stage),
        {0: "a", 1: "b c", 2: "a", 3: "a", 4: "b c", 5: "a"},
    )


@pytest.mark.parametrize("passes", [1, 5])
def test_every_row_learns_from_the_teacher_of_its_prompt_set(taught, passes):
    updater, batch, prompt_sets = taught
    found = updater.update_policy(batch, passes, prompt_sets)
    of_one = {}
    for name in ("a", "b c"):  # the other teacher is the policy, from which nothing diverges
        copies = updater.policy.copies
        others = {
            copy: copies["reference"]
            for copy in copies
            if copy.startswith("teacher:") and copy != teacher_copy_name(name)
        }
        with patch.dict(copies, others):
            of_one[name] = updater.update_policy(batch, passes, prompt_sets)["kl/teacher"]
    assert found["loss"] == pytest.approx(sum(of_one.values()), rel=1e-5)
    assert min(of_one.values()) > 1e-6
    # Four of the six prompts are of the first set.
    assert found["kl/teacher/a"] == pytest.approx(of_one["a"] * 6 / 4, rel=1e-5)
    assert found["kl/teacher/b_c"] == pytest.approx(of_one["b c"] * 6 / 2, rel=1e-5)


def test_two_prompt_sets_with_one_teacher_learn_as_one(taught):
    updater, batch, prompt_sets = taught
    copies = updater.policy.copies
    copies["teacher"] = copies["teacher:b c"] = copies["teacher:a"]
    found = updater.update_policy(batch, 2, prompt_sets)
    del copies["teacher:a"], copies["teacher:b c"]
    assert updater.update_policy(batch, 2)["loss"] == pytest.approx(found["loss"], rel=1e-5)


def test_a_teacher_whose_prompts_are_not_drawn_has_no_metric(taught):
    updater, batch, _ = taught
    found = updater.update_policy(batch, 2, dict.fromkeys(range(6), "a"))
    assert found["kl/teacher/a"] == pytest.approx(found["kl/teacher"])
    assert "kl/teacher/b_c" not in found


def test_float16_halves_the_loss_scale_until_gradients_fit_and_takes_the_same_step(base_folder):
    """An overflowing gradient repeats the passes with half the scale; the step is the one that no
    scale would change.
    """
    steps = {}
    for scale in (1.0, 2.0**140):
        updater = updater_of(load_model(base_folder), NFT, lr=0.01)
        updater.loss_scale = scale
        metrics = updater.update_policy(forward_rows(updater.policy.model, updater.stage), passes=2)
        steps[scale] = (
            values(updater.policy),
            metrics["grad_norm"],
            metrics["grad_variance"],
            updater.loss_scale,
        )
    plain, scaled = steps.values()
    assert 1 < scaled[3] < 2.0**140
    assert farthest(plain[0], scaled[0]) < 1e-6
    assert scaled[1:3] == pytest.approx(plain[1:3], rel=1e-4)


@pytest.mark.parametrize(
    "stage", [{}, {"sampler": {"name": "dpm_solver", "steps": 4}}], ids=["euler", "dpm_solver"]
)
def test_a_band_that_holds_no_sigma_of_the_sampler_stops_the_stage_before_its_rollouts(
    model, stage
):
    band = {"name": "dgpo", "sigma": {"kind": "schedule", "min": 0.97, "max": 0.99}}
    with pytest.raises(
        TrainingError,
        match=r"algorithm.sigma: no sigma .* min = 0.97 and max = 0.99; widen the band, or raise",
    ):
        updater_of(model, band, **stage)
    steps = stage_of("dgpo", **stage).sampler.steps
    assert torch.equal(
        updater_of(model, "dgpo", **stage).sampler_sigmas, model.compute_sigmas(steps)
    )
