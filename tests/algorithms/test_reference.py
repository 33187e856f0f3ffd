"""The three reference penalties against the divergences that they stand for."""

import math

import pytest
import torch
from algorithm_terms import (
    DENSITIES,
    ELEMENTS,
    SIGMAS,
    STOCHASTIC,
    forward_terms,
    kl_per_element,
    mean_square,
    moved,
    normal,
    rollout,
)

from ebbflow.algorithms.reference import penalty
from ebbflow.flow.transition import DEFAULT_ETA
from ebbflow.recipe.choices import Reference

KL, WITHOUT_DT, VELOCITY = (Reference(penalty=name) for name in ("kl", "kl_without_dt", "velocity"))


def steps_apart(sampler):
    """(terms, the policy's velocity, the reference's)."""
    made = rollout(sampler)
    velocity, reference = moved(made), normal(*made.old.shape, seed=9)
    return made.terms(velocity, reference=reference), velocity, reference


@pytest.mark.parametrize("sampler", STOCHASTIC)
def test_kl_is_the_divergence_of_two_gaussians_per_element(sampler):
    terms, velocity, reference = steps_apart(sampler)
    expected = kl_per_element(terms.transition, terms.copies["reference"])
    torch.testing.assert_close(penalty(KL, terms, velocity, reference), expected, rtol=1e-12, atol=0)


def noise_level(sampler):
    """(s, b) of the five steps of ``rollout``, written out again; both contain eta."""
    eta, sigma, after = DEFAULT_ETA[sampler], SIGMAS[:5], SIGMAS[1:6]
    dt = sigma - after
    if sampler == "cps":
        b = after * math.sin(eta * math.pi / 2)
        return b / dt.sqrt(), b
    guarded = torch.cat([SIGMAS[1:2], SIGMAS[1:5]])
    s = eta * (sigma / (1 - guarded)).sqrt() if sampler == "flow_sde" else torch.full_like(sigma, eta)
    return s, s * dt.sqrt()


@pytest.mark.parametrize("sampler", STOCHASTIC)
def test_the_two_scalings_of_kl(sampler):
    terms, velocity, reference = steps_apart(sampler)
    s, b = (each.repeat(2) for each in noise_level(sampler))
    apart = mean_square(terms.transition.mean - terms.copies["reference"].mean)
    torch.testing.assert_close(penalty(KL, terms, velocity, reference), apart / (2 * b**2), rtol=1e-12, atol=0)
    torch.testing.assert_close(penalty(WITHOUT_DT, terms, velocity, reference), apart / (2 * s**2), rtol=1e-12, atol=0)


@pytest.mark.parametrize("terms", [steps_apart("cps")[0], forward_terms([1.0] * 10)], ids=["trajectory", "forward"])
def test_velocity_is_the_mean_square_of_the_change_whatever_the_terms(terms):
    velocity, reference = normal(10, 2, 3, seed=1).requires_grad_(), normal(10, 2, 3, seed=2)
    found = penalty(VELOCITY, terms, velocity, reference)
    torch.testing.assert_close(found, mean_square(velocity - reference), rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(found.sum(), velocity)
    torch.testing.assert_close(gradient, 2 * (velocity - reference).detach() / ELEMENTS, rtol=1e-12, atol=0)


@pytest.mark.parametrize("config", [KL, WITHOUT_DT, VELOCITY], ids=lambda config: config.penalty)
def test_the_base_model_pays_nothing(config):
    made = rollout()
    velocity = moved(made)
    terms = made.terms(velocity, reference=velocity.detach())
    found = penalty(config, terms, velocity, velocity.detach())
    assert (found == 0).all()
    (gradient,) = torch.autograd.grad(found.sum(), velocity)
    assert (gradient == 0).all()


@pytest.mark.parametrize("sampler", DENSITIES)
@pytest.mark.parametrize("config", [KL, WITHOUT_DT], ids=lambda config: config.penalty)
def test_finite_differences(config, sampler):
    made = rollout(sampler)
    reference = normal(*made.old.shape, seed=9)

    def cost(velocity):
        return penalty(config, made.terms(velocity, reference=reference), velocity, reference)

    assert torch.autograd.gradcheck(cost, (moved(made),), eps=1e-6, atol=1e-6)


def test_the_weight_is_not_the_penalty_s_business():
    terms, velocity, reference = steps_apart("flow_sde")
    heavy = Reference(penalty="kl", weight=0.3)
    assert torch.equal(penalty(heavy, terms, velocity, reference), penalty(KL, terms, velocity, reference))
