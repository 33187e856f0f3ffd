"""Flow-DPPO's mask by cases: a term is dropped where it is at the divergence limit and moves
further away.
"""

import pytest
import torch
from algorithm_rows import STOCHASTIC, doubles, gaussian, gradient, moved, rollout

from ebbflow.algorithms.base import TrajectoryRows
from ebbflow.algorithms.built_in.flow_dppo import ALGORITHM, FlowDPPOConfig

# mu - mu_old is the same in every element and b = 2, so D_kl = shift^2 / 8: exact in binary, and
# exactly tau for a shift of 1.
STD = 2.0
TAU = 0.125
SHIFTS = {"below": 0.5, "at": 1.0, "above": 2.0}
RATIOS = [0.2, 0.999, 1.0, 1.001, 5.0]
FURTHER_AWAY = {(1.0, 1.001), (1.0, 5.0), (-1.0, 0.2), (-1.0, 0.999)}


@pytest.mark.parametrize("divergence", SHIFTS)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_the_mask_by_cases(divergence, advantage):
    count = len(RATIOS)
    leaf = doubles(RATIOS).log().requires_grad_()
    old = torch.zeros(count, 3, dtype=torch.float64)
    step = gaussian(old + SHIFTS[divergence], STD)
    advantages = doubles([advantage] * count)
    rows = TrajectoryRows(step, leaf, old, torch.zeros(count, dtype=torch.float64), {}, advantages)
    config = FlowDPPOConfig(divergence_limit=TAU)

    loss, metrics = ALGORITHM.loss(rows, config)
    dropped = [divergence != "below" and (advantage, ratio) in FURTHER_AWAY for ratio in RATIOS]
    expected = [
        0.0 if drop else -advantage * ratio for drop, ratio in zip(dropped, RATIOS, strict=True)
    ]
    assert loss.tolist() == pytest.approx(expected, abs=1e-12)
    assert gradient(ALGORITHM, rows, config, leaf).tolist() == pytest.approx(
        expected, abs=1e-12
    )  # d(A rho) = A rho d log rho
    assert metrics["dppo/dropped"].tolist() == [float(drop) for drop in dropped]
    assert metrics["dppo/divergence"].tolist() == [SHIFTS[divergence] ** 2 / 8] * count


def test_every_term_is_judged_by_its_own_divergence():
    shifts = doubles([0.5, 2.0, 0.5, 2.0])[:, None].expand(4, 3)
    leaf = doubles([0.3] * 4).requires_grad_()
    zeros = torch.zeros(4, 3, dtype=torch.float64)
    step = gaussian(shifts, STD)
    rows = TrajectoryRows(
        step, leaf, zeros, torch.zeros(4, dtype=torch.float64), {}, doubles([1.0, 1.0, -1.0, -1.0])
    )
    _, metrics = ALGORITHM.loss(rows, FlowDPPOConfig(divergence_limit=TAU))
    assert metrics["dppo/dropped"].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("sampler", STOCHASTIC)
@pytest.mark.parametrize("limit", [1e-9, 1.0])
def test_on_real_steps_the_gradient_is_that_of_the_ratio_or_nothing(sampler, limit):
    made = rollout(sampler)
    leaf = moved(made)
    rows = made.rows(leaf)
    config = FlowDPPOConfig(divergence_limit=limit)
    ratio = (rows.log_prob - rows.old_log_prob).exp()
    further = torch.sign(ratio - 1) == torch.sign(rows.advantage)
    kept = ~further if limit == 1e-9 else torch.ones_like(further)
    assert 0 < further.sum() < len(further)
    (expected,) = torch.autograd.grad(-(rows.advantage * ratio)[kept].sum(), leaf)
    found = gradient(ALGORITHM, made.rows(leaf), config, leaf)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert (found[~kept] == 0).all()


def test_loss_gradient_equals_finite_differences():
    made = rollout()
    config = FlowDPPOConfig(divergence_limit=1.0)
    leaf = moved(made)
    assert torch.autograd.gradcheck(
        lambda values: ALGORITHM.loss(made.rows(values), config)[0], (leaf,), eps=1e-6, atol=1e-7
    )
