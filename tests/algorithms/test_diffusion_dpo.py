"""Diffusion-DPO on pairs: its value at the reference, its symmetry, its gradient, and which copy is
the reference.
"""

import math
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

from ebbflow.algorithms.built_in.diffusion_dpo import ALGORITHM, DiffusionDPOConfig

PAIRS = [0, 0, 1, 1, 2, 2]
SWAPPED = [1, 0, 3, 2, 5, 4]
BETAS = [0.5, 50.0]


def pairs(seed=0):
    return forward_rows([1.0, -1.0] * 3, PAIRS, seed)


def swapped(rows):
    return replace(
        rows,
        clean=rows.clean[SWAPPED],
        velocity=rows.velocity[SWAPPED],
        copies={name: value[SWAPPED] for name, value in rows.copies.items()},
    )


def changes(rows, copy="reference"):
    """e - e_ref of each row."""
    return mean_square(rows.velocity - target(rows)) - mean_square(rows.copies[copy] - target(rows))


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_the_published_formula_and_both_rows_carry_it(beta, seed):
    rows = pairs(seed)
    change = changes(rows)
    margin = -beta / 2 * (change[0::2] - change[1::2])
    loss, metrics = ALGORITHM.loss(rows, DiffusionDPOConfig(beta=beta))
    torch.testing.assert_close(
        loss, -(1 / (1 + (-margin).exp())).log().repeat_interleave(2), rtol=1e-9, atol=1e-12
    )
    torch.testing.assert_close(metrics["dpo/margin"], margin.repeat_interleave(2))
    assert metrics["dpo/accuracy"].tolist() == [
        float(each > 0) for each in margin for _ in range(2)
    ]
    torch.testing.assert_close(metrics["dpo/better_change"], change[0::2].repeat_interleave(2))
    torch.testing.assert_close(metrics["dpo/worse_change"], change[1::2].repeat_interleave(2))


@pytest.mark.parametrize("beta", BETAS)
def test_at_the_reference_the_loss_is_log_two_and_the_better_sample_is_approached(beta):
    # d loss / d margin = -1/2, and the mean over both rows of a pair is the pair's loss once.
    rows = pairs()
    rows = at_velocity(rows, rows.copies["reference"])
    loss, _ = ALGORITHM.loss(rows, DiffusionDPOConfig(beta=beta))
    assert loss.tolist() == pytest.approx([math.log(2)] * 6, abs=1e-6)
    found = gradient(ALGORITHM, rows, DiffusionDPOConfig(beta=beta), rows.velocity) / 2
    side = wide(doubles([1, -1] * 3))
    expected = beta / 4 * side * 2 * (rows.velocity.detach() - target(rows)) / ELEMENTS
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_swapping_a_pair_turns_its_margin_around(beta):
    rows = pairs()
    config = DiffusionDPOConfig(beta=beta)
    (here, metrics), (there, other) = (
        ALGORITHM.loss(rows, config),
        ALGORITHM.loss(swapped(rows), config),
    )
    torch.testing.assert_close(metrics["dpo/margin"], -other["dpo/margin"], rtol=1e-12, atol=0)
    assert (here + there > 2 * math.log(2)).all()
    rows = at_velocity(rows, rows.copies["reference"])
    both = ALGORITHM.loss(rows, config)[0] + ALGORITHM.loss(swapped(rows), config)[0]
    assert both.tolist() == pytest.approx([2 * math.log(2)] * 6)


@pytest.mark.parametrize("beta", BETAS)
def test_loss_gradient_equals_finite_differences(beta):
    rows = pairs()
    config = DiffusionDPOConfig(beta=beta)
    velocity = (rows.copies["reference"] + 0.02 * rows.velocity.detach()).requires_grad_()

    def loss(velocity):
        return ALGORITHM.loss(replace(rows, velocity=velocity), config)[0]

    assert torch.autograd.gradcheck(loss, (velocity,), atol=1e-5)


def test_a_pair_far_on_the_wrong_side_has_a_finite_loss_and_the_full_gradient():
    rows = pairs()
    velocity = rows.copies["reference"].clone()
    velocity[0] += 100  # the better sample of the first pair
    rows = at_velocity(rows, velocity)
    config = DiffusionDPOConfig(beta=2000)
    loss, metrics = ALGORITHM.loss(rows, config)
    assert loss[0].item() == pytest.approx(-metrics["dpo/margin"][0].item())
    found = gradient(ALGORITHM, rows, config, rows.velocity)[0] / 2
    torch.testing.assert_close(
        found, 1000 * 2 * (velocity[0] - target(rows)[0]) / ELEMENTS, rtol=1e-9, atol=0
    )


def test_without_refreshing_the_reference_is_the_base_model_for_good():
    config = DiffusionDPOConfig()
    assert ALGORITHM.copies(config) == {"reference"}
    assert [ALGORITHM.follows["old"](config, step) for step in (1, 2, 100)] == [1, 1, 1]


def test_refreshed_the_reference_is_an_older_self():
    config = DiffusionDPOConfig(beta=50, refresh_every=3)
    assert ALGORITHM.copies(config) == {"old"}
    # old <- d old + (1 - d) theta: d = 0 replaces it.
    assert [ALGORITHM.follows["old"](config, step) for step in range(1, 8)] == [1, 1, 0, 1, 1, 0, 1]
    assert [
        ALGORITHM.follows["old"](DiffusionDPOConfig(refresh_every=1), step) for step in (1, 2)
    ] == [0, 0]
    rows = pairs()
    change = changes(rows, "old")
    alone = replace(rows, copies={"old": rows.copies["old"]})
    _, metrics = ALGORITHM.loss(alone, config)
    torch.testing.assert_close(metrics["dpo/margin"][0::2], -25 * (change[0::2] - change[1::2]))
