"""GRPO-Guard against the identity that its ratio is exp(mean(z (mu - mu_old))), z the noise of the
rollout.
"""

from dataclasses import replace

import pytest
import torch
from algorithm_rows import (
    DENSITIES,
    SHAPE,
    Rollout,
    doubles,
    gaussian,
    gradient,
    moved,
    normal,
    rollout,
    wide,
)

from ebbflow.algorithms.base import TrajectoryRows
from ebbflow.algorithms.built_in.flow_grpo import FLOW_GRPO, FlowGRPOConfig
from ebbflow.algorithms.built_in.grpo_guard import ALGORITHM, GRPOGuardConfig

WIDE = GRPOGuardConfig(clip_range=0.99)


def regulated_ratio(rows):
    """rho, read off the loss of a good sample that is never clipped."""
    good = replace(rows, advantage=torch.ones_like(rows.advantage))
    return -ALGORITHM.loss(good, WIDE)[0] * rows.transition.dt.abs()


@pytest.mark.parametrize("sampler", DENSITIES)
def test_the_ratio_is_the_noise_times_the_change_of_the_mean(sampler):
    made = rollout(sampler)
    rows = made.rows(moved(made))
    expected = (made.noise * (rows.transition.mean - rows.old_mean)).mean((1, 2)).exp()
    assert (expected - 1).abs().min() > 1e-5
    assert (regulated_ratio(rows) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("sampler", DENSITIES)
@pytest.mark.parametrize("step", [0, 2, 4])
def test_under_the_old_policy_the_regulated_log_ratio_has_mean_zero(sampler, step):
    count = 20_000
    latents, old, drift = (normal(1, *SHAPE, seed=seed).expand(count, *SHAPE) for seed in range(3))
    steps = torch.full((count,), step)
    made = Rollout(
        sampler,
        latents,
        old,
        normal(count, *SHAPE, seed=3),
        steps,
        torch.ones(count, dtype=torch.float64),
    )
    rows = made.rows(old + 0.3 * drift)
    regulated = regulated_ratio(rows).log()
    plain = rows.log_prob - rows.old_log_prob

    def errors_off(values):
        return (values.mean() / (values.std() / count**0.5)).item()

    assert abs(errors_off(regulated)) < 4
    assert errors_off(plain) < -4  # what the bias repairs


@pytest.mark.parametrize("sampler", DENSITIES)
def test_gradient_at_ratio_one_is_that_of_grpo_times_b_over_dt(sampler):
    made = rollout(sampler)
    leaf = moved(made, by=0)
    rows = made.rows(leaf)
    guarded = gradient(ALGORITHM, rows, GRPOGuardConfig(), leaf)
    plain = gradient(FLOW_GRPO, made.rows(leaf), FlowGRPOConfig(), leaf)
    factor = wide(rows.transition.std / rows.transition.dt.abs())
    assert (factor - 1).abs().min() > 1e-2
    torch.testing.assert_close(guarded, plain * factor, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("sampler", DENSITIES)
def test_the_loss_is_divided_by_the_length_of_the_step(sampler):
    made = rollout(sampler)
    rows = made.rows(made.old)
    assert len(rows.transition.dt.unique()) == 5
    loss, metrics = ALGORITHM.loss(rows, GRPOGuardConfig())
    torch.testing.assert_close(loss, -made.advantage / rows.transition.dt.abs(), rtol=1e-12, atol=0)
    assert (metrics["guard/ratio_deviation"] == 0).all()
    assert (metrics["guard/bias"] == 0).all()


@pytest.mark.parametrize(
    ("advantage", "ratio", "counted", "trained"),
    [
        (2.0, 1.05, 1.05, True),
        (2.0, 1.30, 1.10, False),
        (2.0, 0.70, 0.70, True),
        (-2.0, 1.30, 1.30, True),
        (-2.0, 0.70, 0.90, False),
        (-2.0, 0.95, 0.95, True),
    ],
)
def test_the_clip_bites_the_regulated_ratio(advantage, ratio, counted, trained):
    # mu - mu_old = 1 in every element and b = .5: the bias is 2, and rho = exp((log p - log p_old +
    # 2) .5).
    zeros = torch.zeros(1, 4, dtype=torch.float64)
    std = 0.5
    dt = 0.2
    leaf = (doubles([ratio]).log() / std - 2).requires_grad_()
    step = gaussian(zeros + 1, std, -dt)
    rows = TrajectoryRows(
        step, leaf, zeros, torch.zeros(1, dtype=torch.float64), {}, doubles([advantage])
    )
    config = GRPOGuardConfig(clip_range=0.1)
    loss, metrics = ALGORITHM.loss(rows, config)
    assert loss.item() == pytest.approx(-advantage * counted / dt, abs=1e-12)
    expected = -advantage * ratio * std / dt if trained else 0.0
    assert gradient(ALGORITHM, rows, config, leaf).item() == pytest.approx(expected, abs=1e-12)
    clipped = metrics["clip/up" if advantage > 0 else "clip/down"].item()
    assert clipped == (not trained)
    assert metrics["guard/bias"].item() == pytest.approx(2)
    assert metrics["guard/ratio_deviation"].item() == pytest.approx(abs(ratio - 1))


@pytest.mark.parametrize("sampler", DENSITIES)
def test_loss_gradient_equals_finite_differences(sampler):
    made = rollout(sampler)
    leaf = moved(made)
    assert torch.autograd.gradcheck(
        lambda values: ALGORITHM.loss(made.rows(values), WIDE)[0], (leaf,), eps=1e-6, atol=1e-6
    )
