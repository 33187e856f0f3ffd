"""DGPO: what a whole group still has to gain weighs its terms, and has no gradient of its own."""

from dataclasses import replace

import pytest
import torch
from algorithm_terms import ELEMENTS, at_velocity, forward_terms, gradient, mean_square, target, wide

from ebbflow.algorithms.dgpo import ALGORITHM
from ebbflow.recipe.algorithms import DGPO

ADVANTAGES = [1.0, -1.0, 0.3, -2.0, 1.2, 0.5]
GROUPS = [0, 0, 1, 1, 1, 1]  # of different sizes
BETAS = [0.5, 5.0]


def group_terms(seed=0):
    return forward_terms(ADVANTAGES, GROUPS, seed)


def weights(terms, beta):
    """sigmoid(S_g) at every row, by a loop over the groups."""
    found = []
    for group in terms.unit.tolist():
        mine = terms.unit == group
        errors = [mean_square(v - target(terms)) for v in (terms.velocity.detach(), terms.copies["reference"])]
        gain = (terms.advantage * beta * (errors[0] - errors[1]))[mine].sum() / mine.sum()
        found.append(1 / (1 + (-gain).exp()))
    return torch.stack(found)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_the_published_formula(beta, seed):
    terms = group_terms(seed)
    loss, metrics = ALGORITHM.loss(terms, DGPO(beta=beta))
    expected = weights(terms, beta)
    assert (expected - 0.5).abs().min() > 1e-3
    torch.testing.assert_close(metrics["dgpo/weight"], expected, rtol=1e-12, atol=0)
    error = mean_square(terms.velocity - target(terms))
    torch.testing.assert_close(loss, expected * terms.advantage * error, rtol=1e-12, atol=0)
    torch.testing.assert_close(metrics["dgpo/change"], error - mean_square(terms.copies["reference"] - target(terms)))


@pytest.mark.parametrize("beta", BETAS)
def test_the_gradient_is_the_weight_times_the_advantage_times_that_of_the_error(beta):
    terms = group_terms()
    slope = 2 * (terms.velocity.detach() - target(terms)) / ELEMENTS
    expected = wide(weights(terms, beta) * terms.advantage) * slope
    torch.testing.assert_close(gradient(ALGORITHM, terms, DGPO(beta=beta), terms.velocity), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_at_the_reference_every_group_has_half_to_gain(beta):
    terms = group_terms()
    terms = at_velocity(terms, terms.copies["reference"])
    assert (ALGORITHM.loss(terms, DGPO(beta=beta))[1]["dgpo/weight"] == 0.5).all()


def test_a_group_that_has_learnt_weighs_less():
    # Half the way from the reference to the target of the good samples and as far away from that of the bad ones.
    terms = group_terms()
    reference = terms.copies["reference"]
    learnt = reference + 0.5 * wide(terms.advantage.sign()) * (target(terms) - reference)
    unlearnt = reference - 0.5 * wide(terms.advantage.sign()) * (target(terms) - reference)
    less, more = (ALGORITHM.loss(at_velocity(terms, v), DGPO(beta=1))[1]["dgpo/weight"] for v in (learnt, unlearnt))
    assert less.max() < 0.5 < more.min()


def test_groups_do_not_mix():
    terms = group_terms()
    velocity = terms.velocity.detach().clone()
    velocity[2] += 1
    other = at_velocity(terms, velocity)
    (here, _), (there, _) = ALGORITHM.loss(terms, DGPO(beta=5)), ALGORITHM.loss(other, DGPO(beta=5))
    assert torch.equal(here[:2], there[:2])
    assert (here[2:] != there[2:]).all()


def test_a_group_counts_as_the_mean_of_its_samples_however_many():
    terms = group_terms()
    twice = torch.tensor([0, 0, 1, 1])
    doubled = replace(
        terms,
        clean=terms.clean[twice],
        noise=terms.noise[twice],
        velocity=terms.velocity[twice],
        copies={"reference": terms.copies["reference"][twice]},
        advantage=terms.advantage[twice],
        unit=torch.zeros(4, dtype=torch.int64),
    )
    once, again = (ALGORITHM.loss(each, DGPO(beta=5))[1]["dgpo/weight"] for each in (terms, doubled))
    assert again.tolist() == pytest.approx([once[0].item()] * 4)


def test_it_needs_the_base_model():
    assert ALGORITHM.copies(DGPO()) == {"reference"}
