"""CRD: the implied reward regressed on the advantage, both centred inside the group."""

from dataclasses import replace

import pytest
import torch
from algorithm_rows import ELEMENTS, at_velocity, doubles, forward_rows, gradient, mean_square, target, wide

from ebbflow.algorithms.built_in.crd import ALGORITHM, CRDConfig
from ebbflow.recipe.algorithms import EmaScheduleConfig

ADVANTAGES = [1.0, -0.4, 0.3, -2.0, 1.2, 0.8]  # that are not centred already
GROUPS = [0, 0, 1, 1, 1, 1]
BETAS = [0.1, 1.0]


def group_rows(seed=0):
    return forward_rows(ADVANTAGES, GROUPS, seed)


def centred(values):
    """By hand, of GROUPS."""
    return torch.cat([values[:2] - values[:2].mean(), values[2:] - values[2:].mean()])


def weight(rows, velocity):
    return (velocity - target(rows)).abs().mean((1, 2)).detach()


def miss(rows, beta):
    """beta r~ - a~."""
    velocity, old = rows.velocity.detach(), rows.copies["old"]
    errors = [mean_square(each - target(rows)) / weight(rows, each) for each in (velocity, old)]
    return beta * centred(-(errors[0] - errors[1])) - centred(rows.advantage)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_the_published_formula(beta, seed):
    rows = group_rows(seed)
    torch.testing.assert_close(
        ALGORITHM.loss(rows, CRDConfig(beta=beta))[0], 5 / beta * miss(rows, beta) ** 2, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("beta", BETAS)
def test_the_gradient_by_hand(beta):
    # sum_i (5 / beta) m_i^2 with m = beta r~ - a~ has the gradient 10 m_i dr~_i; as the m_i of a group add up to 0, the centring
    # of r drops out, and dr_i = -2 (v - u) / (D w) with the weight held fixed.
    rows = group_rows()
    slope = -2 * (rows.velocity.detach() - target(rows)) / ELEMENTS / wide(weight(rows, rows.velocity))
    expected = wide(10 * miss(rows, beta)) * slope
    torch.testing.assert_close(gradient(ALGORITHM, rows, CRDConfig(beta=beta), rows.velocity), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_at_the_old_policy_only_the_advantages_are_left(beta):
    rows = group_rows()
    rows = at_velocity(rows, rows.copies["old"])
    loss, metrics = ALGORITHM.loss(rows, CRDConfig(beta=beta))
    advantage = centred(rows.advantage)
    torch.testing.assert_close(loss, 5 / beta * advantage**2, rtol=1e-12, atol=0)
    assert (metrics["crd/implied"] == 0).all()
    # ... and beta drops out of the gradient: good samples are approached, bad ones left.
    error = rows.velocity.detach() - target(rows)
    expected = wide(20 * advantage / ELEMENTS / weight(rows, rows.velocity)) * error
    torch.testing.assert_close(gradient(ALGORITHM, rows, CRDConfig(beta=beta), rows.velocity), expected, rtol=1e-10, atol=1e-12)


def test_a_constant_on_the_advantages_of_a_group_changes_nothing():
    rows, config = group_rows(), CRDConfig()
    shifted = replace(rows, advantage=rows.advantage + doubles([3.0, 3.0, -1.7, -1.7, -1.7, -1.7]))
    torch.testing.assert_close(ALGORITHM.loss(rows, config)[0], ALGORITHM.loss(shifted, config)[0], rtol=1e-12, atol=1e-12)
    here, there = (gradient(ALGORITHM, each, config, each.velocity) for each in (rows, shifted))
    torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-12)


def test_equal_advantages_at_the_old_policy_teach_nothing():
    rows = forward_rows([2.0, 2.0, -1.0, -1.0, -1.0, -1.0], GROUPS)
    rows = at_velocity(rows, rows.copies["old"])
    assert gradient(ALGORITHM, rows, CRDConfig(), rows.velocity).abs().max() < 1e-14


def test_groups_do_not_mix():
    rows, config = group_rows(), CRDConfig()
    velocity, advantage = rows.velocity.detach().clone(), rows.advantage.clone()
    velocity[2] += 1
    advantage[3] += 1
    other = replace(at_velocity(rows, velocity), advantage=advantage)
    here, there = (ALGORITHM.loss(each, config)[0] for each in (rows, other))
    assert torch.equal(here[:2], there[:2])
    assert (here[2:] != there[2:]).all()
    here, there = (gradient(ALGORITHM, each, config, each.velocity) for each in (rows, other))
    assert torch.equal(here[:2], there[:2])


def test_a_prediction_without_error_keeps_its_weight_above_zero():
    rows = group_rows()
    perfect = at_velocity(rows, target(rows))
    loss, _ = ALGORITHM.loss(perfect, CRDConfig())
    assert loss.isfinite().all()
    assert gradient(ALGORITHM, perfect, CRDConfig(), perfect.velocity).isfinite().all()


def test_agreement_counts_the_rows_whose_change_has_the_sign_of_the_advantage():
    rows = group_rows()
    old = rows.copies["old"]
    right = old + 0.3 * wide(centred(rows.advantage).sign()) * (target(rows) - old)
    wrong = old - 0.3 * wide(centred(rows.advantage).sign()) * (target(rows) - old)
    agreement = [ALGORITHM.loss(at_velocity(rows, each), CRDConfig())[1]["crd/agreement"].tolist() for each in (right, wrong)]
    assert agreement == [[1] * 6, [0] * 6]


def test_the_old_policy_generates_is_needed_and_follows():
    assert ALGORITHM.generates == "old"
    assert ALGORITHM.copies(CRDConfig()) == {"old"}
    config = CRDConfig(old=EmaScheduleConfig(warmup=2, slope=0.1, max_decay=0.25))
    assert [ALGORITHM.old_decay(config, step) for step in range(1, 7)] == pytest.approx([0, 0, 0.1, 0.2, 0.25, 0.25])
