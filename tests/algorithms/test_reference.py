"""The three reference penalties against the divergences that they stand for."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_rows import (
    DENSITIES,
    ELEMENTS,
    SIGMAS,
    STOCHASTIC,
    forward_rows,
    kl_per_element,
    mean_square,
    moved,
    normal,
    rollout,
)

from ebbflow.algorithms.loss_terms import compute_penalty
from ebbflow.flow.sampler import find_sampler
from ebbflow.recipe.choices import ReferenceConfig

KL, WITHOUT_DT, VELOCITY = (
    ReferenceConfig(penalty=name) for name in ("kl", "kl_without_dt", "velocity")
)


def penalty_of(config, rows, velocity, reference):
    return compute_penalty(config, rows, velocity, reference, config.copy_name)[0]


def weight_of(config, rows):
    return compute_penalty(config, rows, rows.velocity, rows.velocity, config.copy_name)[1]


def steps_apart(sampler):
    """(rows, the policy's velocity, the reference's)."""
    made = rollout(sampler)
    velocity = moved(made)
    reference = normal(*made.old.shape, seed=9)
    return made.rows(velocity, reference=reference), velocity, reference


@pytest.mark.parametrize("sampler", STOCHASTIC)
def test_kl_is_the_divergence_of_two_gaussians_per_element(sampler):
    rows, velocity, reference = steps_apart(sampler)
    expected = kl_per_element(rows.transition, rows.copies["reference"])
    torch.testing.assert_close(
        penalty_of(KL, rows, velocity, reference), expected, rtol=1e-12, atol=0
    )


def noise_level(sampler):
    """(std_dev_t of published code, b) of the five steps of ``rollout``, written out again; both
    contain eta.
    """
    eta = find_sampler(sampler).eta
    sigma = SIGMAS[:5]
    after = SIGMAS[1:6]
    dt = sigma - after
    if sampler == "cps":
        b = after * math.sin(eta * math.pi / 2)
        return b, b
    guarded = torch.cat([SIGMAS[1:2], SIGMAS[1:5]])
    s = (
        eta * (sigma / (1 - guarded)).sqrt()
        if sampler == "flow_sde"
        else torch.full_like(sigma, eta)
    )
    return s, s * dt.sqrt()


@pytest.mark.parametrize("sampler", STOCHASTIC)
def test_the_two_scalings_of_kl(sampler):
    rows, velocity, reference = steps_apart(sampler)
    s, b = (each.repeat(2) for each in noise_level(sampler))
    apart = mean_square(rows.transition.mean - rows.copies["reference"].mean)
    torch.testing.assert_close(
        penalty_of(KL, rows, velocity, reference), apart / (2 * b**2), rtol=1e-12, atol=0
    )
    torch.testing.assert_close(
        penalty_of(WITHOUT_DT, rows, velocity, reference),
        apart / (2 * s**2),
        rtol=1e-12,
        atol=0,
    )


@pytest.mark.parametrize(
    "rows", [steps_apart("cps")[0], forward_rows([1.0] * 10)], ids=["trajectory", "forward"]
)
def test_velocity_is_the_mean_square_of_the_change_whatever_the_terms(rows):
    velocity = normal(10, 2, 3, seed=1).requires_grad_()
    reference = normal(10, 2, 3, seed=2)
    found = penalty_of(VELOCITY, rows, velocity, reference)
    torch.testing.assert_close(found, mean_square(velocity - reference), rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(found.sum(), velocity)
    torch.testing.assert_close(
        gradient, 2 * (velocity - reference).detach() / ELEMENTS, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("config", [KL, WITHOUT_DT, VELOCITY], ids=lambda config: config.penalty)
def test_the_base_model_pays_nothing(config):
    made = rollout()
    velocity = moved(made)
    rows = made.rows(velocity, reference=velocity.detach())
    found = penalty_of(config, rows, velocity, velocity.detach())
    assert (found == 0).all()
    (gradient,) = torch.autograd.grad(found.sum(), velocity)
    assert (gradient == 0).all()


@pytest.mark.parametrize("sampler", DENSITIES)
@pytest.mark.parametrize("config", [KL, WITHOUT_DT], ids=lambda config: config.penalty)
def test_penalty_gradient_equals_finite_differences(config, sampler):
    made = rollout(sampler)
    reference = normal(*made.old.shape, seed=9)

    def cost(velocity):
        return penalty_of(config, made.rows(velocity, reference=reference), velocity, reference)

    assert torch.autograd.gradcheck(cost, (moved(made),), eps=1e-6, atol=1e-6)


def test_the_weight_is_not_the_penalty_s_business():
    rows, velocity, reference = steps_apart("flow_sde")
    heavy = ReferenceConfig(penalty="kl", weight=0.3)
    assert torch.equal(
        penalty_of(heavy, rows, velocity, reference),
        penalty_of(KL, rows, velocity, reference),
    )


@pytest.mark.parametrize("adaptive", [False, True])
def test_without_adaptation_every_row_has_the_weight(adaptive):
    rows = forward_rows([-5.0, -1.0, 0.0, 5.0])
    weight = weight_of(ReferenceConfig(weight=0.3, adaptive=adaptive), rows)
    assert (weight == 0.3).all() == (not adaptive)


def test_the_adaptive_weight_is_the_published_one_of_the_reward():
    """Its source: kl_beta (m + p (1 - m)) with m = 1e-4 / kl_beta and p = clip(A / c / 2 + 1/2, 0,
    1).
    """
    for clip, advantages in (
        (5.0, [-5.0, -2.5, 0.0, 1.0, 5.0]),
        (2.0, [-2.0, -0.5, 0.0, 1.0, 2.0]),
    ):
        rows = replace(forward_rows(advantages), advantage_clip=clip)
        for weight in (0.1, 2.0):
            least = 1e-4 / weight
            share = np.clip(np.array(advantages) / clip / 2 + 0.5, 0, 1)
            found = weight_of(ReferenceConfig(weight=weight, adaptive=True), rows)
            np.testing.assert_allclose(
                found.numpy(), weight * (least + share * (1 - least)), rtol=1e-12
            )
            assert (found[0].item(), found[-1].item()) == pytest.approx((1e-4, weight))
