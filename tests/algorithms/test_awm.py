"""Advantage-weighted matching: the surrogates by formula, their derivatives by hand, and the lagging copy."""

from dataclasses import replace

import pytest
import torch
from algorithm_terms import ELEMENTS, at_velocity, doubles, forward_terms, gradient, mean_square, target, wide

from ebbflow.algorithms.awm import ALGORITHM, surrogate
from ebbflow.recipe.algorithms import AWM

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
    config = AWM(surrogate=name)
    found = surrogate(error, sigma, config)
    torch.testing.assert_close(found, value(error, sigma), rtol=1e-12, atol=0)
    (derivative,) = torch.autograd.grad(found.sum(), error)
    torch.testing.assert_close(derivative, slope(error.detach(), sigma), rtol=1e-12, atol=0)
    away_from_zero = error.detach()[1:].requires_grad_()
    assert torch.autograd.gradcheck(lambda error: surrogate(error, sigma[1:], config), (away_from_zero,))


def test_the_power_leads_from_the_sigma_surrogate_to_steeper_ones():
    error, sigma = doubles([0.02, 0.3, 2.0]), doubles([0.2, 0.5, 0.9])
    linear = surrogate(error, sigma, AWM(surrogate="sigma"))
    torch.testing.assert_close(surrogate(error, sigma, AWM(power=1.0)), linear, rtol=1e-6, atol=0)
    half = -2 * sigma * ((error + TINY).sqrt() - TINY**0.5)
    torch.testing.assert_close(surrogate(error, sigma, AWM(power=0.5)), half, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", SURROGATES)
def test_a_perfect_prediction_has_the_highest_surrogate_which_is_zero(name):
    error = doubles([0.0, 1e-12, 1e-4, 1.0])
    found = surrogate(error, doubles([0.5] * 4), AWM(surrogate=name))
    assert found[0] == 0
    assert (found.diff() < 0).all()


@pytest.mark.parametrize("name", SURROGATES)
def test_the_loss_is_the_advantage_over_five_times_the_surrogate_and_so_is_its_gradient(name):
    terms, config = replace(forward_terms(ADVANTAGES), copies={}), AWM(surrogate=name, old_weight=0)
    value, slope = SURROGATES[name]
    error = mean_square(terms.velocity.detach() - target(terms))
    loss, metrics = ALGORITHM.loss(terms, config)
    torch.testing.assert_close(loss, -terms.advantage / 5 * value(error, terms.sigma), rtol=1e-12, atol=0)
    torch.testing.assert_close(metrics["awm/error"], error, rtol=1e-12, atol=0)
    inner = 2 * (terms.velocity.detach() - target(terms)) / ELEMENTS
    expected = wide(-terms.advantage / 5 * slope(error, terms.sigma)) * inner
    assert (gradient(ALGORITHM, terms, config, terms.velocity) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("name", SURROGATES)
def test_finite_differences(name):
    terms, config = forward_terms(ADVANTAGES), AWM(surrogate=name, old_weight=0.7)

    def loss(velocity):
        return ALGORITHM.loss(replace(terms, velocity=velocity), config)[0]

    assert torch.autograd.gradcheck(loss, (terms.velocity,))


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_the_lagging_copy_pulls_with_its_weight(weight):
    terms = forward_terms(ADVANTAGES)
    apart = terms.velocity.detach() - terms.copies["old"]
    (near, metrics), (free, _) = (ALGORITHM.loss(terms, AWM(old_weight=each)) for each in (weight, 0))
    torch.testing.assert_close(near - free, weight * mean_square(apart), rtol=1e-9, atol=0)
    torch.testing.assert_close(metrics["awm/old_deviation"], mean_square(apart))
    pull, none = (gradient(ALGORITHM, terms, AWM(old_weight=each), terms.velocity) for each in (weight, 0))
    torch.testing.assert_close(pull - none, weight * 2 * apart / ELEMENTS, rtol=1e-9, atol=1e-12)


def test_at_the_lagging_copy_there_is_no_pull():
    terms = forward_terms(ADVANTAGES)
    terms = at_velocity(terms, terms.copies["old"])
    (near, metrics), (free, _) = (ALGORITHM.loss(terms, AWM(old_weight=each)) for each in (1, 0))
    assert torch.equal(near, free)
    assert (metrics["awm/old_deviation"] == 0).all()
    pull, none = (gradient(ALGORITHM, terms, AWM(old_weight=each), terms.velocity) for each in (1, 0))
    assert torch.equal(pull, none)


def test_a_copy_is_kept_only_for_the_pull():
    assert ALGORITHM.copies(AWM()) == {"old"}
    assert ALGORITHM.copies(AWM(old_weight=0)) == set()
    _, metrics = ALGORITHM.loss(replace(forward_terms(ADVANTAGES), copies={}), AWM(old_weight=0))
    assert "awm/old_deviation" not in metrics
    assert ALGORITHM.generates == "current"


def test_the_copy_follows_as_published():
    for step in (1, 7, 299, 300, 301, 5000):
        assert ALGORITHM.old_decay(AWM(), step) == pytest.approx(min(0.3, 0.001 * step))
