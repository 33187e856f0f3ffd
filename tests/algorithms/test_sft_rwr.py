"""Supervised fine-tuning and reward-weighted regression: flow matching, plain and weighted."""

from dataclasses import replace

import pytest
import torch
from algorithm_rows import ELEMENTS, at_velocity, forward_rows, gradient, mean_square, target, wide

from ebbflow.algorithms.built_in import rwr, sft
from ebbflow.algorithms.built_in.rwr import RWRConfig
from ebbflow.algorithms.built_in.sft import SFTConfig

ADVANTAGES = [-5.0, -1.3, 0.0, 0.7, 5.0]


def slope(rows):
    return 2 * (rows.velocity.detach() - target(rows)) / ELEMENTS


def test_sft_is_flow_matching_whatever_the_advantage():
    rows = forward_rows(ADVANTAGES)
    loss, _ = sft.ALGORITHM.loss(rows, SFTConfig())
    torch.testing.assert_close(
        loss, mean_square(rows.velocity - rows.noise + rows.clean), rtol=1e-12, atol=0
    )
    torch.testing.assert_close(
        gradient(sft.ALGORITHM, rows, SFTConfig(), rows.velocity), slope(rows), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_rwr_weighs_flow_matching_with_the_exponential_of_the_advantage(temperature):
    rows = forward_rows(ADVANTAGES)
    config = RWRConfig(temperature=temperature)
    weight = (rows.advantage / temperature).exp()
    loss, metrics = rwr.ALGORITHM.loss(rows, config)
    torch.testing.assert_close(
        loss, weight * mean_square(rows.velocity - target(rows)), rtol=1e-12, atol=0
    )
    torch.testing.assert_close(metrics["rwr/weight"], weight)
    found = gradient(rwr.ALGORITHM, rows, config, rows.velocity)
    torch.testing.assert_close(found, wide(weight) * slope(rows), rtol=1e-12, atol=0)


def test_average_samples_and_hot_temperatures_make_rwr_plain_flow_matching():
    average = forward_rows([0.0] * 5)
    plain = sft.ALGORITHM.loss(average, SFTConfig())[0]
    assert torch.equal(rwr.ALGORITHM.loss(average, RWRConfig(temperature=0.1))[0], plain)
    hot = rwr.ALGORITHM.loss(forward_rows(ADVANTAGES), RWRConfig(temperature=1e9))[0]
    torch.testing.assert_close(hot, plain, rtol=1e-8, atol=0)


@pytest.mark.parametrize(
    ("algorithm", "config"), [(sft.ALGORITHM, SFTConfig()), (rwr.ALGORITHM, RWRConfig())]
)
def test_finite_differences_and_the_minimum(algorithm, config):
    rows = forward_rows(ADVANTAGES)

    def loss(velocity):
        return algorithm.loss(replace(rows, velocity=velocity), config)[0]

    assert torch.autograd.gradcheck(loss, (rows.velocity,), atol=1e-5)
    best = at_velocity(rows, target(rows))
    assert (loss(best.velocity) == 0).all()
    assert (gradient(algorithm, best, config, best.velocity) == 0).all()
