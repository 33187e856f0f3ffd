"""The clipped policy gradient against its cases and closed forms."""

import math

import numpy as np
import pytest
import torch
from algorithm_rows import STOCHASTIC, doubles, gaussian, gradient, moved, normal, rollout

from ebbflow.algorithms.advantages import compute_advantages
from ebbflow.algorithms.base import TrajectoryRows
from ebbflow.algorithms.built_in.flow_grpo import (
    FLOW_GRPO,
    DanceGRPOConfig,
    FlowGRPOConfig,
    FlowGRPOFastConfig,
    MixGRPOConfig,
)
from ebbflow.algorithms.loss_terms import compute_dead_share
from ebbflow.algorithms.registry import find_algorithm
from ebbflow.flow.sampler import compute_log_prob, sample_next_latents
from ebbflow.recipe.choices import AdvantagesConfig

FAMILY = [FlowGRPOConfig, FlowGRPOFastConfig, MixGRPOConfig, DanceGRPOConfig]
WIDE = FlowGRPOConfig(clip_range=0.99)

# clip range .1: (advantage, ratio, the ratio that counts, whether it has a gradient, which clip)
CASES = [
    (2.0, 1.05, 1.05, True, None),
    (2.0, 1.30, 1.10, False, "clip/up"),
    (2.0, 0.95, 0.95, True, None),
    (2.0, 0.70, 0.70, True, None),
    (-2.0, 1.05, 1.05, True, None),
    (-2.0, 1.30, 1.30, True, None),
    (-2.0, 0.95, 0.95, True, None),
    (-2.0, 0.70, 0.90, False, "clip/down"),
    (0.0, 1.30, 1.00, False, None),
    (0.0, 0.70, 1.00, False, None),
]


def rows_with_ratio(ratio, advantage):
    """Terms whose ratios and advantages are given, and the leaf that their log-probabilities
    are."""
    leaf = doubles(ratio).log().requires_grad_()
    zeros = torch.zeros(len(ratio), 2, dtype=torch.float64)
    return (
        TrajectoryRows(
            gaussian(zeros, 1.0),
            leaf,
            zeros,
            torch.zeros_like(leaf.detach()),
            {},
            doubles(advantage),
        ),
        leaf,
    )


@pytest.mark.parametrize("config", FAMILY)
def test_ppo_clip_by_cases(config):
    advantage, ratio, counted, trained, clip = (list(column) for column in zip(*CASES, strict=True))
    rows, leaf = rows_with_ratio(ratio, advantage)
    algorithm = find_algorithm(config())
    config = config(clip_range=0.1)
    loss, metrics = algorithm.loss(rows, config)
    assert loss.tolist() == pytest.approx(
        [-a * c for a, c in zip(advantage, counted, strict=True)], abs=1e-12
    )
    expected = [-a * r if t else 0.0 for a, r, t in zip(advantage, ratio, trained, strict=True)]
    assert gradient(algorithm, rows, config, leaf).tolist() == pytest.approx(expected, abs=1e-12)
    for name in ("clip/up", "clip/down"):
        assert metrics[name].tolist() == [float(each == name) for each in clip]


def test_metrics_say_how_far_the_policy_has_moved():
    ratio = [1.3, 0.7, 1.0]
    rows, _ = rows_with_ratio(ratio, [1.0, -1.0, 2.0])
    _, metrics = FLOW_GRPO.loss(rows, FlowGRPOConfig())
    assert metrics["ratio/mean"].tolist() == pytest.approx(ratio)
    assert metrics["ratio/deviation"].tolist() == pytest.approx([0.3, 0.3, 0])
    assert metrics["kl/old"].tolist() == pytest.approx([math.log(each) ** 2 / 2 for each in ratio])


@pytest.mark.parametrize(
    ("deviation", "clip", "share"),
    [(1.2533e-5, 1e-5, 0.21), (1.2533e-5, 2e-6, 0.44), (2e-4, 1e-4, 0.31), (2e-4, 2e-6, 0.5)],
)
def test_a_ratio_off_one_leaves_terms_without_a_gradient_by_the_gaussian_tail(
    deviation, clip, share
):
    """Half of the terms outside the clip range: those whose advantage points away. A mean |ratio -
    1| of 1e-5 is 1.2533e-5.
    """
    count = 20_000
    rows, leaf = rows_with_ratio(
        (deviation * normal(count, seed=0)).exp().tolist(), normal(count, seed=1).tolist()
    )
    config = FlowGRPOConfig(clip_range=clip)
    dead = (gradient(FLOW_GRPO, rows, config, leaf) == 0).double().mean().item()
    expected = math.erfc(clip / deviation / math.sqrt(2)) / 2
    assert expected == pytest.approx(share, abs=0.005)
    assert abs(dead - expected) < 4 * math.sqrt(expected * (1 - expected) / count)
    metrics = {
        name: values.mean().item() for name, values in FLOW_GRPO.loss(rows, config)[1].items()
    }
    assert compute_dead_share(metrics) == pytest.approx(dead)


@pytest.mark.parametrize("sampler", STOCHASTIC)
def test_gradient_at_ratio_one_is_the_policy_gradient(sampler):
    made = rollout(sampler)
    leaf = moved(made, by=0)
    rows = made.rows(leaf)
    found = gradient(FLOW_GRPO, rows, FlowGRPOConfig(), leaf)
    (expected,) = torch.autograd.grad(-(rows.advantage * rows.log_prob).sum(), leaf)
    assert (FLOW_GRPO.loss(rows, FlowGRPOConfig())[1]["ratio/deviation"] == 0).all()
    assert expected.flatten(1).norm(dim=1).min() > 1e-3
    assert (found - expected).abs().max() < 1e-12


def test_gradient_at_ratio_one_by_hand():
    # log p = mean(-(x' - mu)^2 / (2 b^2)) with x' - mu = b z, so d log p / d mu = z / (b D).
    made = rollout()
    mean = made.step(made.old).mean.requires_grad_()
    step = gaussian(mean, 0.3)
    after = sample_next_latents(step, made.noise).detach()
    score = compute_log_prob(step, after)
    rows = TrajectoryRows(step, score, mean.detach(), score.detach(), {}, made.advantage)
    found = gradient(FLOW_GRPO, rows, FlowGRPOConfig(), mean)
    assert (found + made.advantage[:, None, None] * made.noise / (0.3 * 6)).abs().max() < 1e-12


@pytest.mark.parametrize("sampler", STOCHASTIC)
def test_loss_gradient_equals_finite_differences(sampler):
    made = rollout(sampler)
    leaf = moved(made)
    assert FLOW_GRPO.loss(made.rows(leaf), WIDE)[1]["ratio/deviation"].min() > 1e-6
    assert torch.autograd.gradcheck(
        lambda values: FLOW_GRPO.loss(made.rows(values), WIDE)[0], (leaf,), eps=1e-6, atol=1e-7
    )


def test_linear_gaussian_policy_has_the_gradient_of_reinforce():
    # x ~ N(theta c, b^2 I) for a prompt c, R = w x: the gradient of E[R] is w c^T. GRPO subtracts a
    # mean that contains the sample itself, hence (G - 1) / G, and takes log-probs as means over D
    # elements, hence 1 / D.
    groups = 50_000
    size = 4
    elements = 8
    std = 0.7
    weights = normal(elements, seed=0)
    theta = normal(elements, 3, seed=1).requires_grad_()
    prompts = 1 + 0.5 * normal(groups, 3, seed=2)
    step = gaussian(prompts.repeat_interleave(size, 0) @ theta.T, std)
    after = sample_next_latents(step, normal(groups * size, elements, seed=3)).detach()
    config = AdvantagesConfig(std="none", clip=1e6)
    rewards = {"only": (after @ weights).numpy()}
    prompt_ids = np.repeat(np.arange(groups), size)
    advantage = compute_advantages(rewards, {"only": 1.0}, prompt_ids, config).values
    score = compute_log_prob(step, after)
    rows = TrajectoryRows(
        step, score, step.mean.detach(), score.detach(), {}, torch.from_numpy(advantage).double()
    )
    found = -gradient(FLOW_GRPO, rows, FlowGRPOConfig(), theta) / len(advantage)
    reinforce = weights[:, None] * prompts.mean(0)
    expected = reinforce * (size - 1) / size / elements
    assert torch.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.999
    assert (found.norm() / expected.norm()).item() == pytest.approx(1, abs=0.02)


def test_likelihood_ratio_has_mean_one_under_the_old_policy():
    # Under the old policy the likelihood ratio has mean 1; the ratio of mean log-probs that the
    # loss clips stays below.
    count = 400_000
    elements = 4
    std = 0.5
    shift = 0.12 * doubles([1.0, -1.0, 2.0, 0.5])
    old = gaussian(torch.zeros(count, elements, dtype=torch.float64), std)
    after = sample_next_latents(old, normal(count, elements, seed=0))
    step = gaussian(shift.expand(count, elements), std)
    score = compute_log_prob(step, after)
    old_score = compute_log_prob(old, after)
    rows = TrajectoryRows(
        step, score, old.mean, old_score, {}, torch.ones(count, dtype=torch.float64)
    )
    assert (elements * (score - old_score)).exp().mean().item() == pytest.approx(1, abs=5e-3)
    distance = (shift**2).sum().item() / (2 * std**2 * elements)
    expected = math.exp(-distance * (1 - 1 / elements))
    assert expected < 0.97
    assert -FLOW_GRPO.loss(rows, WIDE)[0].mean().item() == pytest.approx(expected, abs=1e-3)


def test_the_rollout_comes_from_the_policy_itself_and_no_copy_is_needed():
    for config in FAMILY:
        algorithm = find_algorithm(config())
        assert algorithm.copies(config()) == set()
        assert algorithm.generates == "current"
