"""One optimiser step: what it computes does not depend on how the work is dealt out, and it never goes through on nonsense."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from training_cases import (
    ALONE,
    FULL,
    GROUPS,
    LORA,
    NFT,
    PAIRS,
    farthest,
    forward_terms,
    learner_of,
    quietly,
    sgd,
    spoilt,
    stage_of,
    trajectory_terms,
)

from ebbflow.algorithms import diffusion_nft
from ebbflow.algorithms.base import Algorithm, per_term, rows
from ebbflow.flow.noise import SampleKeys
from ebbflow.models import Conditioning, load_model
from ebbflow.recipe.algorithms import ForwardConfig
from ebbflow.recipe.recipe import Policy as PolicyConfig
from ebbflow.training.batches import ForwardBatch, Points
from ebbflow.training.update import Learner, TrainingError, make_optimizer
from tests.parameters import move, moved, same, values

NAN, INF = float("nan"), float("inf")
UNITS = {"diffusion_nft": ALONE, "dgpo": GROUPS, "crd": GROUPS, "diffusion_dpo": PAIRS}


class Own(ForwardConfig):
    """An algorithm of this file."""


def root_of_nothing(terms, config):
    """Backwards 0 / 0, in the rows whose clean latent is 0."""
    there = (terms.clean.flatten(1)[:, 0] != 0).float()
    return (terms.velocity.flatten(1).abs().sum(1) * there).sqrt(), {}


ROOT = Algorithm(Own, root_of_nothing)
INFINITE = Algorithm(Own, lambda terms, config: (per_term(terms.velocity) + INF, {}))
LINEAR = Algorithm(Own, lambda terms, config: ((terms.velocity * terms.noise).sum(1), {}))


def own(name):
    return {"name": "custom", "path": f"{__name__}:{name}"}


@pytest.mark.parametrize("algorithm", UNITS)
def test_micro_batches_do_not_change_the_step(base_folder, algorithm):
    """Nor do they tear pairs and groups apart: a part of a group would have another loss."""
    results = []
    for passes in (1, 2, 3):
        learner = learner_of(load_model(base_folder), algorithm, lr=1e-2, reference={"weight": 0.1})
        move(learner.policy)
        start = values(learner.policy)
        batch = forward_terms(learner.policy.model, learner.stage, UNITS[algorithm])
        metrics = [learner.update(batch, passes) for _ in range(2)]
        assert farthest(start, values(learner.policy)) > 1e-4
        results.append((values(learner.policy), metrics))
    for after, metrics in results[1:]:
        assert farthest(after, results[0][0]) < 1e-5
        for found, expected in zip(metrics, results[0][1], strict=True):
            assert found.pop("grad_variance")
            # The drift is measured on the first part, and is one for all passes only where that is everything.
            found, expected = ({**m, "velocity_drift": 0} for m in (found, expected))
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_metrics_are_means_over_the_terms(model):
    learner = learner_of(model, NFT, reference={"weight": 0.1})
    learner.optimizer = make_optimizer(learner.policy, learner.stage.optimizer.model_copy(update={"lr": 1e-4}))
    batch = forward_terms(model, learner.stage)
    with torch.no_grad():
        velocity = model.velocity(batch.points.latents, batch.points.sigma, batch.points.conditioning)
        loss, expected = diffusion_nft.loss(batch.terms(slice(0, 6), velocity, {"old": velocity}), learner.hyper)
    metrics = learner.update(batch, 4)
    assert metrics["loss"] == pytest.approx(loss.mean().item(), rel=1e-5)
    assert metrics["nft/better_error"] == pytest.approx(expected["nft/better_error"].mean().item(), rel=1e-5)
    assert metrics["velocity_drift"] == pytest.approx(0, abs=1e-10)
    assert metrics["lr"] == 1e-4
    assert {"loss", "grad_norm", "grad_variance", "kl/reference", "nft/old_deviation", "nft/worse_error"} <= metrics.keys()
    assert learner.updates == 1


# The reference penalty stands beside the algorithm and is the same for all of them.


def penalty_by_hand(penalty, policy, batch):
    """The mean penalty of a trajectory batch, from what both policies predict."""

    @torch.no_grad()
    def predicted():
        velocity = policy.model.velocity(*batch.points.at(slice(None)))
        return velocity, batch.transition(slice(None), velocity)

    velocity, step = predicted()
    with policy.using("reference"):
        base_velocity, base = predicted()
    if penalty == "velocity":
        return ((velocity - base_velocity) ** 2).mean().item()
    scale = step.std if penalty == "kl" else step.scale
    return (((step.mean - base.mean) / rows(scale, step.mean)) ** 2).mean().item() / 2


@pytest.mark.parametrize("penalty", ["kl", "kl_without_dt", "velocity"])
def test_the_reference_penalty_is_added_with_its_weight(model, penalty):
    learner = learner_of(model, "mix_grpo", lr=0, reference={"weight": 5, "penalty": penalty})
    policy = learner.policy
    batch = trajectory_terms(model, learner.stage)
    move(policy, 0.005)
    without = Learner(policy, stage_of("mix_grpo", reference={"weight": 0}), optimizer=sgd(policy, 0)).update(batch, 2)
    metrics = learner.update(batch, 2)
    expected = penalty_by_hand(penalty, policy, batch)
    assert expected > 1e-6
    assert metrics["kl/reference"] == pytest.approx(expected, rel=1e-4)
    assert metrics["loss"] - without["loss"] == pytest.approx(5 * expected, rel=1e-3)
    assert metrics["grad_norm"] != pytest.approx(without["grad_norm"], rel=1e-4)
    assert "kl/reference" not in without


# Nonsense in one row: the step is not taken, and the row is named.


def state(learner):
    """Everything that a step changes."""
    policy = learner.policy
    copies = {f"{name} {key}": value.clone() for name, copy in policy.copies.items() for key, value in copy.items()}
    momenta = {
        f"{i} {key}": torch.as_tensor(value).clone()
        for i, of in learner.optimizer.state_dict()["state"].items()
        for key, value in of.items()
    }
    return values(policy) | copies | momenta | {"updates": torch.tensor(learner.updates)}


def refused(learner, batch, passes=3):
    """The message of a step that is not taken."""
    before = state(learner)
    with pytest.raises(TrainingError) as error:
        learner.update(batch, passes)
    assert same(state(learner), before)
    text = str(error.value)
    assert "the step was not taken" in text
    assert "optimizer.lr" in text
    return text


def with_adam(learner, batch):
    """The learner after a first good step, so that its optimiser and its copies have something to lose."""
    learner.optimizer = make_optimizer(learner.policy, learner.stage.optimizer)
    learner.update(batch, 1)
    return learner


@pytest.mark.parametrize("row", [0, 3, 5])
@pytest.mark.parametrize(("place", "wrong"), [("clean", NAN), ("clean", INF), ("advantage", NAN), ("noise", -INF)])
def test_nonsense_in_a_sample_names_it_and_stops_the_step(model, place, wrong, row):
    learner = learner_of(model, NFT, PolicyConfig(ema={"most": 0.5}))
    batch = forward_terms(model, learner.stage)
    text = refused(with_adam(learner, batch), spoilt(batch, place, row, wrong))
    assert f"of prompt {row}, sample 7, noised to sigma {batch.points.sigma[row].item():.4f}" in text
    assert "not finite: " in text
    assert "loss" in text.split(" of prompt")[0]


@pytest.mark.parametrize("wrong", [NAN, INF])
@pytest.mark.parametrize("place", ["old_log_prob", "next_latents", "advantage"])
def test_nonsense_in_a_step_of_a_trajectory_names_sample_and_step(model, place, wrong):
    learner = learner_of(model, "mix_grpo")
    batch = trajectory_terms(model, learner.stage)
    text = refused(with_adam(learner, batch), spoilt(batch, place, 10, wrong))  # three steps a sample: the second of the fourth
    assert f"of prompt 3, sample 7, denoising step 1 (sigma {batch.points.sigma[10].item():.4f})" in text


def test_what_is_wrong_with_a_term_is_said_by_its_metrics(model):
    learner = learner_of(model, "mix_grpo")
    batch = trajectory_terms(model, learner.stage)
    named = refused(learner, spoilt(batch, "old_log_prob", 4, NAN)).split("not finite: ")[1].split(" of prompt")[0].split(", ")
    assert {"loss", "ratio/mean", "kl/old", "the gradient"} <= set(named)
    assert not {"velocity_drift", "kl/reference"} & set(named)


@pytest.mark.parametrize("algorithm", ["dgpo", "crd", "diffusion_dpo"])
def test_nonsense_in_a_group_names_the_group(model, algorithm):
    """What is wrong with one sample of a group is wrong with all of them: the first is named."""
    learner = learner_of(model, algorithm)
    unit = UNITS[algorithm]
    batch = forward_terms(model, learner.stage, unit)
    text = refused(learner, spoilt(batch, "clean", 4, NAN), passes=2)
    wrong = unit[batch.keys.prompt_ids[4]]
    members = [f"prompt {row}," for row in range(6) if unit[row] == wrong]
    assert any(member in text for member in members)


def test_a_gradient_that_alone_is_not_finite_names_its_sample(model):
    learner = learner_of(model, own("ROOT"))
    batch = spoilt(forward_terms(model, stage_of(NFT)), "clean", 2, 0.0)
    text = refused(learner, batch)
    assert f"not finite: the gradient of prompt 2, sample 7, noised to sigma {batch.points.sigma[2].item():.4f}" in text


def test_a_gradient_that_overflows_on_its_way_back_names_the_parameter(model):
    learner = learner_of(model, NFT)
    name = sorted(learner.policy.parameters)[3]
    hook = learner.policy.parameters[name].register_hook(lambda gradient: gradient * INF)
    assert f"the gradient of {name} and" in refused(learner, forward_terms(model, learner.stage))
    hook.remove()
    assert np.isfinite(learner.update(forward_terms(model, learner.stage), 1)["grad_norm"])


def test_a_loss_that_alone_is_not_finite_stops_the_step(model):
    learner = learner_of(model, own("INFINITE"))
    assert "not finite: loss of prompt 0" in refused(learner, forward_terms(model, stage_of(NFT)))


@pytest.mark.parametrize("share", [0.25, 4.0])
def test_the_gradient_is_clipped_to_its_norm_and_never_scaled_up(model, share):
    still = learner_of(model, NFT, lr=0)
    norm = still.update(forward_terms(model, still.stage), 2)["grad_norm"]
    learner = learner_of(model, NFT, lr=1, optimizer={"max_grad_norm": share * norm})
    before = values(learner.policy)
    metrics = learner.update(forward_terms(model, learner.stage), 2)
    moved = sum(((value - before[name]) ** 2).sum() for name, value in learner.policy.parameters.items()) ** 0.5
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert moved.item() == pytest.approx(min(1, share) * norm, rel=1e-3)


# Trajectories: what was rolled out is what is trained on.

TRAJECTORY = ["flow_grpo", "flow_grpo_fast", "mix_grpo", "dance_grpo", "grpo_guard", "flow_dppo", "distillation"]
ON_SAMPLERS = [(a, s) for a in TRAJECTORY for s in ("flow_sde", "dance_sde", "cps") if (a, s) != ("grpo_guard", "cps")]


def keys_of(name):
    return {"name": name} | ({"teacher": "t"} if name == "distillation" else {})


@pytest.mark.parametrize(("algorithm", "sampler"), ON_SAMPLERS)
def test_the_first_ratio_after_a_rollout_is_one(model, algorithm, sampler):
    learner = learner_of(model, keys_of(algorithm), sampler={"name": sampler, "steps": 5}, reference={"weight": 0.1})
    move(learner.policy)
    metrics = learner.update(trajectory_terms(model, learner.stage, (0, 1, 3)), 3)
    assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["ratio/deviation"] < 1e-6
    assert metrics["kl/old"] == pytest.approx(0, abs=1e-9)
    assert metrics["kl/reference"] > 1e-6


@pytest.mark.parametrize("config", [FULL, LORA], ids=["full", "lora"])
def test_the_ratio_leaves_one_with_the_first_update(model, config):
    learner = learner_of(model, "mix_grpo", config, lr=1.0)
    batch = trajectory_terms(model, learner.stage)
    assert learner.update(batch, 2)["ratio/deviation"] < 1e-6
    assert learner.update(batch, 2)["ratio/deviation"] > 1e-6


@pytest.mark.parametrize("algorithm", TRAJECTORY)
def test_without_a_learning_rate_the_ratio_stays_one(model, algorithm):
    learner = learner_of(model, keys_of(algorithm))
    before = values(learner.policy)
    learner.policy.copies["teacher"] = moved(learner.policy)
    learner.optimizer = make_optimizer(learner.policy, learner.stage.optimizer.model_copy(update={"lr": 0.0}))
    batch = trajectory_terms(model, learner.stage)
    for passes in (1, 2, 3, 2):
        metrics = learner.update(batch, passes)
        assert metrics["ratio/deviation"] < 1e-6
        assert metrics["velocity_drift"] == pytest.approx(0, abs=1e-10)
        assert metrics["grad_norm"] > 0
    assert same(values(learner.policy), before)


def test_a_policy_that_is_its_teacher_has_nothing_to_learn(model):
    learner = learner_of(model, keys_of("distillation"))
    metrics = learner.update(trajectory_terms(model, learner.stage), 2)
    assert metrics["loss"] == pytest.approx(0, abs=1e-12)
    assert metrics["kl/teacher"] == pytest.approx(0, abs=1e-12)


def test_a_policy_comes_closer_to_its_teacher(model):
    learner = learner_of(model, keys_of("distillation"), lr=3.0)
    learner.policy.copies["teacher"] = moved(learner.policy, 0.01)
    batch = trajectory_terms(model, learner.stage)
    losses = [learner.update(batch, 1)["loss"] for _ in range(8)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * losses[0]


# The drift alarm.


def test_the_drift_alarm_warns_once_and_stays_on(model):
    learner = learner_of(model, NFT, lr=0.05, drift_alarm=1e-9)
    batch = forward_terms(model, learner.stage)
    assert quietly(learner.update, batch, 2)["alarm/velocity_drift"] == 0
    assert not learner.alarms
    with pytest.warns(UserWarning, match=r"velocity drift .* above drift_alarm = 1e-09 after 2 .*reference\.weight") as warned:
        assert learner.update(batch, 2)["alarm/velocity_drift"] == 1
    assert len(warned) == 1
    assert quietly(learner.update, batch, 2)["alarm/velocity_drift"] == 1
    assert len(learner.alarms) == 1
    assert "above drift_alarm = 1e-09 after 2 optimiser steps" in learner.alarms[0]


def test_another_alarm_does_not_silence_the_drift_alarm(model):
    learner = learner_of(model, NFT, lr=0.05, drift_alarm=1e-9)
    learner.alarms.append("left out: a shard")
    batch = forward_terms(model, learner.stage)
    learner.update(batch, 2)
    with pytest.warns(UserWarning, match="^velocity drift"):
        learner.update(batch, 2)
    assert [alarm.split(" ")[0] for alarm in learner.alarms] == ["left", "velocity"]


def test_a_policy_that_stays_near_the_base_raises_no_alarm(model):
    learner = learner_of(model, NFT, lr=1e-3)
    for _ in range(3):
        assert quietly(learner.update, forward_terms(model, learner.stage), 2)["alarm/velocity_drift"] == 0
    assert not learner.alarms


# Weights and gradient variance, on a policy whose per-term gradients are given: v = w, loss of a term = <w, g_i>.


def linear_policy(elements):
    weight = torch.nn.Parameter(torch.zeros(elements))
    model = SimpleNamespace(
        velocity=lambda latents, sigma, conditioning: weight.expand(len(latents), elements), precision="float32"
    )
    return SimpleNamespace(
        parameters={"weight": weight}, model=model, copies={}, using=lambda name: nullcontext(), config=PolicyConfig()
    )


def given_gradients(gradients, weight=None):
    count = len(gradients)
    points = Points(gradients, torch.zeros(count), Conditioning({"embeds": gradients}), torch.arange(count))
    weight, unit = torch.ones(count) if weight is None else weight, torch.arange(count)
    keys = SampleKeys(0, unit.tolist(), unit.tolist())
    return ForwardBatch(points, weight, unit, gradients, gradients, torch.zeros(count), keys)


def linear_learner(elements, lr=0.1):
    policy = linear_policy(elements)
    return Learner(policy, stage_of(own("LINEAR")), optimizer=sgd(policy, lr))


def gradient_metrics(gradients, passes):
    return linear_learner(gradients.shape[1]).update(given_gradients(gradients), passes)


@pytest.mark.parametrize("passes", [1, 3])
def test_the_weight_of_a_term_scales_its_loss_and_leaves_the_denominator(passes):
    gradients = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    weight = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.25, 0.0, 1.0])
    learner = linear_learner(5, lr=1.0)
    metrics = learner.update(given_gradients(gradients, weight), passes)
    mean = (weight[:, None] * gradients).sum(0) / 7
    torch.testing.assert_close(learner.policy.parameters["weight"].detach(), -mean)
    assert metrics["grad_norm"] == pytest.approx(mean.norm().item(), rel=1e-5)
    learner.policy.parameters["weight"].data.fill_(1.0)
    assert learner.update(given_gradients(gradients, weight), passes)["loss"] == pytest.approx(mean.sum().item(), rel=1e-4)


def test_gradient_norm_and_variance_of_known_gradients():
    gradients = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    metrics = gradient_metrics(gradients, passes=3)
    small, whole = gradients[:4].mean(0).norm().item(), gradients.mean(0).norm().item()
    assert metrics["grad_norm"] == pytest.approx(whole, rel=1e-5)
    assert metrics["grad_variance"] == pytest.approx((small**2 - whole**2) / (1 / 4 - 1 / 12), rel=1e-4)
    assert "grad_variance" not in gradient_metrics(gradients, passes=1)


def test_gradient_variance_is_the_trace_of_the_covariance_on_average():
    generator = torch.Generator().manual_seed(0)
    spread = torch.tensor([0.5, 1.0, 2.0])
    trials = [
        gradient_metrics(torch.tensor([3.0, -1.0, 0.0]) + spread * torch.randn(16, 3, generator=generator), 4)["grad_variance"]
        for _ in range(800)
    ]
    assert np.mean(trials) == pytest.approx((spread**2).sum().item(), abs=4 * np.std(trials) / len(trials) ** 0.5)


def test_equal_gradients_have_no_variance():
    assert gradient_metrics(torch.ones(8, 3), passes=4)["grad_variance"] == pytest.approx(0, abs=1e-5)


def test_float16_halves_the_loss_scale_until_gradients_fit_and_takes_the_same_step(base_folder):
    """An overflowing gradient repeats the passes with half the scale; the step is the one that no scale would change."""
    steps = {}
    for scale in (1.0, 2.0**140):
        learner = learner_of(load_model(base_folder), NFT, lr=0.01)
        learner.loss_scale = scale
        metrics = learner.update(forward_terms(learner.policy.model, learner.stage), passes=2)
        steps[scale] = (values(learner.policy), metrics["grad_norm"], metrics["grad_variance"], learner.loss_scale)
    plain, scaled = steps.values()
    assert 1 < scaled[3] < 2.0**140
    assert farthest(plain[0], scaled[0]) < 1e-6
    assert scaled[1:3] == pytest.approx(plain[1:3], rel=1e-4)


def test_a_loss_that_is_not_finite_is_no_overflow(base_folder):
    learner = learner_of(load_model(base_folder), NFT)
    learner.loss_scale = 2.0**16
    batch = spoilt(forward_terms(learner.policy.model, learner.stage), "clean", 1, float("nan"))
    with pytest.raises(TrainingError, match="not finite"):
        learner.update(batch, passes=1)
    assert learner.loss_scale == 2.0**16
