"""Advantage-weighted matching: the surrogates by formula, their derivatives by hand, and the
lagging copy.
"""

from dataclasses import replace

import pytest
import torch
from algorithm_rows import (
    ELEMENTS,
    at_velocity,
    doubles,
    forward_rows,
    gradient,
    mean_square,
    target,
    wide,
)

from ebbflow.algorithms.built_in.awm import ALGORITHM, AWMConfig, compute_surrogate

ADVANTAGES = [-5.0, -1.3, 0.0, 0.7, 5.0]
TINY = 1e-10

# name: (s, ds / dl), of the error l and sigma
SURROGATES = {
    "power": (
        lambda error, sigma: -(sigma / 0.25) * ((error + TINY) ** 0.25 - TINY**0.25),
        lambda error, sigma: -sigma * (error + TINY) ** -0.75,
    ),
    "plain": (lambda error, sigma: -error, lambda error, sigma: -torch.ones_like(error)),
    "sigma": (lambda error, sigma: -sigma * error, lambda error, sigma: -sigma),
    "sigma_squared": (lambda error, sigma: -(sigma**2) * error, lambda error, sigma: -(sigma**2)),
}


@pytest.mark.parametrize("name", SURROGATES)
def test_surrogates_and_their_derivatives(name):
    value, slope = SURROGATES[name]
    error = doubles([1e-9, 0.02, 0.3, 1.0, 7.0]).requires_grad_()
    sigma = doubles([0.1, 0.3, 0.5, 0.8, 1.0])
    config = AWMConfig(surrogate=name)
    found = compute_surrogate(error, sigma, config)
    torch.testing.assert_close(found, value(error, sigma), rtol=1e-12, atol=0)
    (derivative,) = torch.autograd.grad(found.sum(), error)
    torch.testing.assert_close(derivative, slope(error.detach(), sigma), rtol=1e-12, atol=0)
    away_from_zero = error.detach()[1:].requires_grad_()
    assert torch.autograd.gradcheck(
        lambda error: compute_surrogate(error, sigma[1:], config), (away_from_zero,)
    )


def test_the_power_leads_from_the_sigma_surrogate_to_steeper_ones():
    error = doubles([0.02, 0.3, 2.0])
    sigma = doubles([0.2, 0.5, 0.9])
    linear = compute_surrogate(error, sigma, AWMConfig(surrogate="sigma"))
    torch.testing.assert_close(
        compute_surrogate(error, sigma, AWMConfig(power=1.0)), linear, rtol=1e-6, atol=0
    )
    half = -2 * sigma * ((error + TINY).sqrt() - TINY**0.5)
    torch.testing.assert_close(
        compute_surrogate(error, sigma, AWMConfig(power=0.5)), half, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("name", SURROGATES)
def test_a_perfect_prediction_has_the_highest_surrogate_which_is_zero(name):
    error = doubles([0.0, 1e-12, 1e-4, 1.0])
    found = compute_surrogate(error, doubles([0.5] * 4), AWMConfig(surrogate=name))
    assert found[0] == 0
    assert (found.diff() < 0).all()


@pytest.mark.parametrize("clip", [5.0, 2.0])
@pytest.mark.parametrize("name", SURROGATES)
def test_the_loss_is_the_share_of_the_largest_advantage_times_the_ratio_and_so_is_its_gradient(
    name, clip
):
    rows = forward_rows([each * clip / 5 for each in ADVANTAGES], advantage_clip=clip)
    value, slope = SURROGATES[name]
    error, before = (
        mean_square(v.detach() - target(rows)) for v in (rows.velocity, rows.copies["rollout"])
    )
    ratio = (value(error, rows.sigma) - value(before, rows.sigma)).exp()
    assert (ratio - 1).abs().min() > 0.01
    config = AWMConfig(surrogate=name, old_weight=0, clip_range=2 * ratio.max().item())
    loss, metrics = ALGORITHM.loss(rows, config)
    share = doubles(ADVANTAGES) / 5
    torch.testing.assert_close(loss, -share * ratio, rtol=1e-12, atol=0)
    torch.testing.assert_close(metrics["awm/error"], error, rtol=1e-12, atol=0)
    torch.testing.assert_close(metrics["awm/ratio"], ratio, rtol=1e-12, atol=0)
    inner = 2 * (rows.velocity.detach() - target(rows)) / ELEMENTS
    expected = wide(-share * ratio * slope(error, rows.sigma)) * inner
    torch.testing.assert_close(
        gradient(ALGORITHM, rows, config, rows.velocity), expected, rtol=1e-10, atol=1e-13
    )


@pytest.mark.parametrize("name", SURROGATES)
def test_where_no_weight_has_moved_the_ratio_is_one_and_its_gradient_that_of_the_surrogate(name):
    rows = forward_rows(ADVANTAGES)
    config = AWMConfig(surrogate=name, old_weight=0)
    rows = replace(rows, copies={"rollout": rows.velocity.detach()})
    loss, metrics = ALGORITHM.loss(rows, config)
    assert (metrics["awm/ratio"] == 1).all()
    assert torch.equal(loss, -rows.advantage / 5)
    value = compute_surrogate(mean_square(rows.velocity - target(rows)), rows.sigma, config)
    (expected,) = torch.autograd.grad((-rows.advantage / 5 * value).sum(), rows.velocity)
    torch.testing.assert_close(
        gradient(ALGORITHM, rows, config, rows.velocity), expected, rtol=1e-12, atol=1e-15
    )


def test_a_ratio_outside_the_clip_range_has_no_gradient_where_it_went_far_enough():
    rows = forward_rows([1.0, -1.0, 1.0, -1.0])
    near = rows.noise - rows.clean + 0.1 * (rows.velocity.detach() - (rows.noise - rows.clean))
    far = rows.velocity.detach()
    now, before = (
        torch.cat([near[:2], far[2:]]),
        torch.cat([far[:2], near[2:]]),
    )  # the first two rose, the others fell
    rows = at_velocity(replace(rows, copies={"rollout": before}), now)
    config = AWMConfig(old_weight=0, clip_range=0.01)
    loss, metrics = ALGORITHM.loss(rows, config)
    assert metrics["clip/up"].tolist() == [1, 0, 0, 0]
    assert metrics["clip/down"].tolist() == [0, 0, 0, 1]
    moved = gradient(ALGORITHM, rows, config, rows.velocity).flatten(1).abs().sum(1) > 0
    assert moved.tolist() == [False, True, True, False]
    assert loss[0].item() == pytest.approx(-1.01 / 5)


@pytest.mark.parametrize("name", SURROGATES)
def test_loss_gradient_equals_finite_differences(name):
    rows = forward_rows(ADVANTAGES)
    config = AWMConfig(surrogate=name, old_weight=0.7, clip_range=100.0)

    def loss(velocity):
        return ALGORITHM.loss(replace(rows, velocity=velocity), config)[0]

    assert torch.autograd.gradcheck(loss, (rows.velocity,))


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_the_lagging_copy_pulls_with_its_weight(weight):
    rows = forward_rows(ADVANTAGES)
    apart = rows.velocity.detach() - rows.copies["old"]
    (near, metrics), (free, _) = (
        ALGORITHM.loss(rows, AWMConfig(old_weight=each)) for each in (weight, 0)
    )
    torch.testing.assert_close(near - free, weight * mean_square(apart), rtol=1e-9, atol=0)
    torch.testing.assert_close(metrics["awm/old_deviation"], mean_square(apart))
    pull, none = (
        gradient(ALGORITHM, rows, AWMConfig(old_weight=each), rows.velocity) for each in (weight, 0)
    )
    torch.testing.assert_close(pull - none, weight * 2 * apart / ELEMENTS, rtol=1e-9, atol=1e-12)


def test_at_the_lagging_copy_there_is_no_pull():
    rows = forward_rows(ADVANTAGES)
    rows = at_velocity(rows, rows.copies["old"])
    (near, metrics), (free, _) = (
        ALGORITHM.loss(rows, AWMConfig(old_weight=each)) for each in (1, 0)
    )
    assert torch.equal(near, free)
    assert (metrics["awm/old_deviation"] == 0).all()
    pull, none = (
        gradient(ALGORITHM, rows, AWMConfig(old_weight=each), rows.velocity) for each in (1, 0)
    )
    assert torch.equal(pull, none)


def test_a_copy_is_kept_only_for_the_pull():
    assert ALGORITHM.copies(AWMConfig()) == {"old", "rollout"}
    assert ALGORITHM.copies(AWMConfig(old_weight=0)) == {"rollout"}
    rows = forward_rows(ADVANTAGES)
    _, metrics = ALGORITHM.loss(
        replace(rows, copies={"rollout": rows.copies["rollout"]}), AWMConfig(old_weight=0)
    )
    assert "awm/old_deviation" not in metrics
    assert ALGORITHM.generates == "current"


def test_the_copy_follows_as_published():
    for step in (1, 7, 299, 300, 301, 5000):
        assert ALGORITHM.follows["old"](AWMConfig(), step) == pytest.approx(min(0.3, 0.001 * step))
