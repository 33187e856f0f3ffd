"""CRD: the implied reward regressed on the advantage, both centred inside the group."""

from dataclasses import replace

import pytest
import torch
from algorithm_terms import ELEMENTS, at_velocity, doubles, forward_terms, gradient, mean_square, target, wide

from ebbflow.algorithms.crd import ALGORITHM
from ebbflow.recipe.algorithms import CRD, Following

ADVANTAGES = [1.0, -0.4, 0.3, -2.0, 1.2, 0.8]  # that are not centred already
GROUPS = [0, 0, 1, 1, 1, 1]
BETAS = [0.1, 1.0]


def group_terms(seed=0):
    return forward_terms(ADVANTAGES, GROUPS, seed)


def centred(values):
    """By hand, of GROUPS."""
    return torch.cat([values[:2] - values[:2].mean(), values[2:] - values[2:].mean()])


def weight(terms, velocity):
    return (velocity - target(terms)).abs().mean((1, 2)).detach()


def miss(terms, beta):
    """beta r~ - a~."""
    velocity, old = terms.velocity.detach(), terms.copies["old"]
    errors = [mean_square(each - target(terms)) / weight(terms, each) for each in (velocity, old)]
    return beta * centred(-(errors[0] - errors[1])) - centred(terms.advantage)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_the_published_formula(beta, seed):
    terms = group_terms(seed)
    torch.testing.assert_close(ALGORITHM.loss(terms, CRD(beta=beta))[0], 5 / beta * miss(terms, beta) ** 2, rtol=1e-12, atol=0)


@pytest.mark.parametrize("beta", BETAS)
def test_the_gradient_by_hand(beta):
    # sum_i (5 / beta) m_i^2 with m = beta r~ - a~ has the gradient 10 m_i dr~_i; as the m_i of a group add up to 0, the centring
    # of r drops out, and dr_i = -2 (v - u) / (D w) with the weight held fixed.
    terms = group_terms()
    slope = -2 * (terms.velocity.detach() - target(terms)) / ELEMENTS / wide(weight(terms, terms.velocity))
    expected = wide(10 * miss(terms, beta)) * slope
    torch.testing.assert_close(gradient(ALGORITHM, terms, CRD(beta=beta), terms.velocity), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_at_the_old_policy_only_the_advantages_are_left(beta):
    terms = group_terms()
    terms = at_velocity(terms, terms.copies["old"])
    loss, metrics = ALGORITHM.loss(terms, CRD(beta=beta))
    advantage = centred(terms.advantage)
    torch.testing.assert_close(loss, 5 / beta * advantage**2, rtol=1e-12, atol=0)
    assert (metrics["crd/implied"] == 0).all()
    # ... and beta drops out of the gradient: good samples are approached, bad ones left.
    error = terms.velocity.detach() - target(terms)
    expected = wide(20 * advantage / ELEMENTS / weight(terms, terms.velocity)) * error
    torch.testing.assert_close(gradient(ALGORITHM, terms, CRD(beta=beta), terms.velocity), expected, rtol=1e-10, atol=1e-12)


def test_a_constant_on_the_advantages_of_a_group_changes_nothing():
    terms, config = group_terms(), CRD()
    shifted = replace(terms, advantage=terms.advantage + doubles([3.0, 3.0, -1.7, -1.7, -1.7, -1.7]))
    torch.testing.assert_close(ALGORITHM.loss(terms, config)[0], ALGORITHM.loss(shifted, config)[0], rtol=1e-12, atol=1e-12)
    here, there = (gradient(ALGORITHM, each, config, each.velocity) for each in (terms, shifted))
    torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-12)


def test_equal_advantages_at_the_old_policy_teach_nothing():
    terms = forward_terms([2.0, 2.0, -1.0, -1.0, -1.0, -1.0], GROUPS)
    terms = at_velocity(terms, terms.copies["old"])
    assert gradient(ALGORITHM, terms, CRD(), terms.velocity).abs().max() < 1e-14


def test_groups_do_not_mix():
    terms, config = group_terms(), CRD()
    velocity, advantage = terms.velocity.detach().clone(), terms.advantage.clone()
    velocity[2] += 1
    advantage[3] += 1
    other = replace(at_velocity(terms, velocity), advantage=advantage)
    here, there = (ALGORITHM.loss(each, config)[0] for each in (terms, other))
    assert torch.equal(here[:2], there[:2])
    assert (here[2:] != there[2:]).all()
    here, there = (gradient(ALGORITHM, each, config, each.velocity) for each in (terms, other))
    assert torch.equal(here[:2], there[:2])


def test_a_prediction_without_error_keeps_its_weight_above_zero():
    terms = group_terms()
    perfect = at_velocity(terms, target(terms))
    loss, _ = ALGORITHM.loss(perfect, CRD())
    assert loss.isfinite().all()
    assert gradient(ALGORITHM, perfect, CRD(), perfect.velocity).isfinite().all()


def test_agreement_counts_the_rows_whose_change_has_the_sign_of_the_advantage():
    terms = group_terms()
    old = terms.copies["old"]
    right = old + 0.3 * wide(centred(terms.advantage).sign()) * (target(terms) - old)
    wrong = old - 0.3 * wide(centred(terms.advantage).sign()) * (target(terms) - old)
    agreement = [ALGORITHM.loss(at_velocity(terms, each), CRD())[1]["crd/agreement"].tolist() for each in (right, wrong)]
    assert agreement == [[1] * 6, [0] * 6]


def test_the_old_policy_generates_is_needed_and_follows():
    assert ALGORITHM.generates == "old"
    assert ALGORITHM.copies(CRD()) == {"old"}
    config = CRD(old=Following(flat=2, slope=0.1, most=0.25))
    assert [ALGORITHM.old_decay(config, step) for step in range(1, 7)] == pytest.approx([0, 0, 0.1, 0.2, 0.25, 0.25])
