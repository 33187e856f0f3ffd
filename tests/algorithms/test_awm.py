"""Advantage-weighted matching: the surrogates by formula, their derivatives by hand, and the lagging copy."""

from dataclasses import replace

import pytest
import torch
from algorithm_rows import ELEMENTS, at_velocity, doubles, forward_rows, gradient, mean_square, target, wide

from ebbflow.algorithms.built_in.awm import ALGORITHM, AWMConfig, surrogate

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
    error, sigma = doubles([1e-9, 0.02, 0.3, 1.0, 7.0]).requires_grad_(), doubles([0.1, 0.3, 0.5, 0.8, 1.0])
    config = AWMConfig(surrogate=name)
    found = surrogate(error, sigma, config)
    torch.testing.assert_close(found, value(error, sigma), rtol=1e-12, atol=0)
    (derivative,) = torch.autograd.grad(found.sum(), error)
    torch.testing.assert_close(derivative, slope(error.detach(), sigma), rtol=1e-12, atol=0)
    away_from_zero = error.detach()[1:].requires_grad_()
    assert torch.autograd.gradcheck(lambda error: surrogate(error, sigma[1:], config), (away_from_zero,))


def test_the_power_leads_from_the_sigma_surrogate_to_steeper_ones():
    error, sigma = doubles([0.02, 0.3, 2.0]), doubles([0.2, 0.5, 0.9])
    linear = surrogate(error, sigma, AWMConfig(surrogate="sigma"))
    torch.testing.assert_close(surrogate(error, sigma, AWMConfig(power=1.0)), linear, rtol=1e-6, atol=0)
    half = -2 * sigma * ((error + TINY).sqrt() - TINY**0.5)
    torch.testing.assert_close(surrogate(error, sigma, AWMConfig(power=0.5)), half, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", SURROGATES)
def test_a_perfect_prediction_has_the_highest_surrogate_which_is_zero(name):
    error = doubles([0.0, 1e-12, 1e-4, 1.0])
    found = surrogate(error, doubles([0.5] * 4), AWMConfig(surrogate=name))
    assert found[0] == 0
    assert (found.diff() < 0).all()


@pytest.mark.parametrize("name", SURROGATES)
def test_the_loss_is_the_advantage_over_five_times_the_surrogate_and_so_is_its_gradient(name):
    rows, config = replace(forward_rows(ADVANTAGES), copies={}), AWMConfig(surrogate=name, old_weight=0)
    value, slope = SURROGATES[name]
    error = mean_square(rows.velocity.detach() - target(rows))
    loss, metrics = ALGORITHM.loss(rows, config)
    torch.testing.assert_close(loss, -rows.advantage / 5 * value(error, rows.sigma), rtol=1e-12, atol=0)
    torch.testing.assert_close(metrics["awm/error"], error, rtol=1e-12, atol=0)
    inner = 2 * (rows.velocity.detach() - target(rows)) / ELEMENTS
    expected = wide(-rows.advantage / 5 * slope(error, rows.sigma)) * inner
    assert (gradient(ALGORITHM, rows, config, rows.velocity) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("name", SURROGATES)
def test_finite_differences(name):
    rows, config = forward_rows(ADVANTAGES), AWMConfig(surrogate=name, old_weight=0.7)

    def loss(velocity):
        return ALGORITHM.loss(replace(rows, velocity=velocity), config)[0]

    assert torch.autograd.gradcheck(loss, (rows.velocity,))


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_the_lagging_copy_pulls_with_its_weight(weight):
    rows = forward_rows(ADVANTAGES)
    apart = rows.velocity.detach() - rows.copies["old"]
    (near, metrics), (free, _) = (ALGORITHM.loss(rows, AWMConfig(old_weight=each)) for each in (weight, 0))
    torch.testing.assert_close(near - free, weight * mean_square(apart), rtol=1e-9, atol=0)
    torch.testing.assert_close(metrics["awm/old_deviation"], mean_square(apart))
    pull, none = (gradient(ALGORITHM, rows, AWMConfig(old_weight=each), rows.velocity) for each in (weight, 0))
    torch.testing.assert_close(pull - none, weight * 2 * apart / ELEMENTS, rtol=1e-9, atol=1e-12)


def test_at_the_lagging_copy_there_is_no_pull():
    rows = forward_rows(ADVANTAGES)
    rows = at_velocity(rows, rows.copies["old"])
    (near, metrics), (free, _) = (ALGORITHM.loss(rows, AWMConfig(old_weight=each)) for each in (1, 0))
    assert torch.equal(near, free)
    assert (metrics["awm/old_deviation"] == 0).all()
    pull, none = (gradient(ALGORITHM, rows, AWMConfig(old_weight=each), rows.velocity) for each in (1, 0))
    assert torch.equal(pull, none)


def test_a_copy_is_kept_only_for_the_pull():
    assert ALGORITHM.copies(AWMConfig()) == {"old"}
    assert ALGORITHM.copies(AWMConfig(old_weight=0)) == set()
    _, metrics = ALGORITHM.loss(replace(forward_rows(ADVANTAGES), copies={}), AWMConfig(old_weight=0))
    assert "awm/old_deviation" not in metrics
    assert ALGORITHM.generates == "current"


def test_the_copy_follows_as_published():
    for step in (1, 7, 299, 300, 301, 5000):
        assert ALGORITHM.follows["old"](AWMConfig(), step) == pytest.approx(min(0.3, 0.001 * step))
