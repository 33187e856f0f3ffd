"""Supervised fine-tuning and reward-weighted regression: flow matching, plain and weighted."""

from dataclasses import replace

import pytest
import torch
from algorithm_terms import ELEMENTS, at_velocity, forward_terms, gradient, mean_square, target, wide

from ebbflow.algorithms import rwr, sft
from ebbflow.recipe.algorithms import RWR, SFT

ADVANTAGES = [-5.0, -1.3, 0.0, 0.7, 5.0]


def slope(terms):
    return 2 * (terms.velocity.detach() - target(terms)) / ELEMENTS


def test_sft_is_flow_matching_whatever_the_advantage():
    terms = forward_terms(ADVANTAGES)
    loss, _ = sft.ALGORITHM.loss(terms, SFT())
    torch.testing.assert_close(loss, mean_square(terms.velocity - terms.noise + terms.clean), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient(sft.ALGORITHM, terms, SFT(), terms.velocity), slope(terms), rtol=1e-12, atol=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_rwr_weighs_flow_matching_with_the_exponential_of_the_advantage(temperature):
    terms, config = forward_terms(ADVANTAGES), RWR(temperature=temperature)
    weight = (terms.advantage / temperature).exp()
    loss, metrics = rwr.ALGORITHM.loss(terms, config)
    torch.testing.assert_close(loss, weight * mean_square(terms.velocity - target(terms)), rtol=1e-12, atol=0)
    torch.testing.assert_close(metrics["rwr/weight"], weight)
    found = gradient(rwr.ALGORITHM, terms, config, terms.velocity)
    torch.testing.assert_close(found, wide(weight) * slope(terms), rtol=1e-12, atol=0)


def test_average_samples_and_hot_temperatures_make_rwr_plain_flow_matching():
    average = forward_terms([0.0] * 5)
    plain = sft.ALGORITHM.loss(average, SFT())[0]
    assert torch.equal(rwr.ALGORITHM.loss(average, RWR(temperature=0.1))[0], plain)
    hot = rwr.ALGORITHM.loss(forward_terms(ADVANTAGES), RWR(temperature=1e9))[0]
    torch.testing.assert_close(hot, plain, rtol=1e-8, atol=0)


@pytest.mark.parametrize(("algorithm", "config"), [(sft.ALGORITHM, SFT()), (rwr.ALGORITHM, RWR())])
def test_finite_differences_and_the_minimum(algorithm, config):
    terms = forward_terms(ADVANTAGES)

    def loss(velocity):
        return algorithm.loss(replace(terms, velocity=velocity), config)[0]

    assert torch.autograd.gradcheck(loss, (terms.velocity,), atol=1e-5)
    best = at_velocity(terms, target(terms))
    assert (loss(best.velocity) == 0).all()
    assert (gradient(algorithm, best, config, best.velocity) == 0).all()
