"""DGPO: what a whole group still has to gain weighs its rows, and has no gradient of its own."""

import math
from dataclasses import replace

import pytest
import torch
from algorithm_rows import ELEMENTS, at_velocity, forward_rows, gradient, mean_square, target, wide

from ebbflow.algorithms.built_in.dgpo import ALGORITHM, DGPOConfig

ADVANTAGES = [1.0, -1.0, 0.3, -2.0, 1.2, 0.5]
GROUPS = [0, 0, 1, 1, 1, 1]  # of different sizes
BETAS = [0.5, 5.0]


def group_rows(seed=0):
    return forward_rows(ADVANTAGES, GROUPS, seed)


def weights(rows, beta):
    """sigmoid(S_g) at every row, by a loop over the groups."""
    found = []
    for group in rows.group_index.tolist():
        mine = rows.group_index == group
        errors = [
            mean_square(v - target(rows))
            for v in (rows.velocity.detach(), rows.copies["reference"])
        ]
        gain = (rows.advantage * beta * (errors[0] - errors[1]))[mine].sum() / mine.sum()
        found.append(1 / (1 + (-gain).exp()))
    return torch.stack(found)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_the_published_formula(beta, seed):
    rows = group_rows(seed)
    loss, metrics = ALGORITHM.loss(rows, DGPOConfig(beta=beta, clip_range=None))
    expected = weights(rows, beta)
    assert (expected - 0.5).abs().min() > 1e-3
    torch.testing.assert_close(metrics["dgpo/weight"], expected, rtol=1e-12, atol=0)
    error = mean_square(rows.velocity - target(rows))
    torch.testing.assert_close(loss, expected * rows.advantage * error, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        metrics["dgpo/change"], error - mean_square(rows.copies["reference"] - target(rows))
    )


@pytest.mark.parametrize("beta", BETAS)
def test_the_gradient_is_the_weight_times_the_advantage_times_that_of_the_error(beta):
    rows = group_rows()
    slope = 2 * (rows.velocity.detach() - target(rows)) / ELEMENTS
    expected = wide(weights(rows, beta) * rows.advantage) * slope
    torch.testing.assert_close(
        gradient(ALGORITHM, rows, DGPOConfig(beta=beta, clip_range=None), rows.velocity),
        expected,
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("beta", BETAS)
def test_at_the_reference_every_group_has_half_to_gain(beta):
    rows = group_rows()
    rows = at_velocity(rows, rows.copies["reference"])
    assert (
        ALGORITHM.loss(rows, DGPOConfig(beta=beta, clip_range=None))[1]["dgpo/weight"] == 0.5
    ).all()


def test_a_group_that_has_learnt_weighs_less():
    # Half the way from the reference to the target of the good samples and as far away from that of
    # the bad ones.
    rows = group_rows()
    reference = rows.copies["reference"]
    learnt = reference + 0.5 * wide(rows.advantage.sign()) * (target(rows) - reference)
    unlearnt = reference - 0.5 * wide(rows.advantage.sign()) * (target(rows) - reference)
    less, more = (
        ALGORITHM.loss(at_velocity(rows, v), DGPOConfig(beta=1, clip_range=None))[1]["dgpo/weight"]
        for v in (learnt, unlearnt)
    )
    assert less.max() < 0.5 < more.min()


def test_groups_do_not_mix():
    rows = group_rows()
    velocity = rows.velocity.detach().clone()
    velocity[2] += 1
    other = at_velocity(rows, velocity)
    (here, _), (there, _) = (
        ALGORITHM.loss(rows, DGPOConfig(beta=5, clip_range=None)),
        ALGORITHM.loss(other, DGPOConfig(beta=5, clip_range=None)),
    )
    assert torch.equal(here[:2], there[:2])
    assert (here[2:] != there[2:]).all()


def test_a_group_counts_as_the_mean_of_its_samples_however_many():
    rows = group_rows()
    twice = torch.tensor([0, 0, 1, 1])
    doubled = replace(
        rows,
        clean=rows.clean[twice],
        noise=rows.noise[twice],
        velocity=rows.velocity[twice],
        copies={"reference": rows.copies["reference"][twice]},
        advantage=rows.advantage[twice],
        group_index=torch.zeros(4, dtype=torch.int64),
    )
    once, again = (
        ALGORITHM.loss(each, DGPOConfig(beta=5, clip_range=None))[1]["dgpo/weight"]
        for each in (rows, doubled)
    )
    assert again.tolist() == pytest.approx([once[0].item()] * 4)


@pytest.mark.parametrize("seed", range(3))
def test_the_clip_takes_the_gradient_of_rows_that_moved_far_enough_from_the_old_policy(seed):
    rows = group_rows(seed)
    config = DGPOConfig(beta=5, clip_range=0.2)
    free = DGPOConfig(beta=5, clip_range=None)
    errors, old_errors = (
        mean_square(v - target(rows)) for v in (rows.velocity.detach(), rows.copies["old"])
    )
    clipped = []
    for error, old, advantage in zip(errors.tolist(), old_errors.tolist(), ADVANTAGES, strict=True):
        ratio = math.exp(old - error)
        clipped.append(ratio > 1.2 if advantage > 0 else ratio < 0.8)
    assert 0 < sum(clipped) < len(clipped)
    (loss, metrics), (unclipped, _) = ALGORITHM.loss(rows, config), ALGORITHM.loss(rows, free)
    assert metrics["dgpo/clipped"].tolist() == clipped
    assert torch.equal(loss, unclipped)
    found, whole = (gradient(ALGORITHM, rows, each, rows.velocity) for each in (config, free))
    assert torch.equal(found, whole * wide(~torch.tensor(clipped)))


def test_at_the_old_policy_nothing_is_clipped():
    rows = group_rows()
    metrics = ALGORITHM.loss(at_velocity(rows, rows.copies["old"]), DGPOConfig(clip_range=1e-6))[1]
    assert not metrics["dgpo/clipped"].any()


def test_it_needs_the_base_model_and_for_its_clip_a_copy_that_follows():
    assert ALGORITHM.copies(DGPOConfig()) == {"reference", "old"}
    assert ALGORITHM.copies(DGPOConfig(clip_range=None)) == {"reference"}
    assert ALGORITHM.list_following_copies(DGPOConfig(clip_range=None)) == ()
    assert ALGORITHM.list_following_copies(DGPOConfig()) == ("old",)
    assert [
        ALGORITHM.follows["old"](DGPOConfig(), step) for step in (1, 100, 300, 301)
    ] == pytest.approx([0.001, 0.1, 0.3, 0.3])
