"""TDM-R1: the surrogate learns from whole groups, and the student from the surrogate."""

from dataclasses import replace

import pytest
import torch
from algorithm_rows import ELEMENTS, SHAPE, doubles, matching_rows, mean_square, normal, wide

from ebbflow.algorithms.base import Algorithm, SurrogateRows
from ebbflow.algorithms.built_in import tdm
from ebbflow.algorithms.built_in.tdm import TDMConfig
from ebbflow.algorithms.built_in.tdm_r1 import (
    ALGORITHM,
    TDMR1Config,
    compute_loss,
    compute_surrogate_loss,
)

ADVANTAGES = [1.0, -1.0, 0.3, -2.0, 1.2, 0.0]
GROUPS = [0, 0, 1, 1, 1, 1]  # of different sizes
SHARES = [0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
OPEN = {"clip_range": 0.999, "teacher_limit": 1e9}
"""No row is clipped: rho > 1.999 needs an error that has fallen by .69."""


def surrogate_rows(seed=0, near=1.0):
    """Rows whose velocities lie ``near`` each other; that of the surrogate is a leaf."""
    target, centre, *others = (normal(6, *SHAPE, seed=10 * seed + index) for index in range(5))
    velocity, teacher, old = (centre + near * value for value in others)
    return SurrogateRows(
        velocity=velocity.requires_grad_(),
        target=target,
        teacher=teacher,
        old=old,
        step_share=doubles(SHARES),
        advantage=doubles(ADVANTAGES),
        group_index=torch.tensor(GROUPS),
    )


def errors_of(rows):
    """(of the surrogate, the teacher, the average), each [M]."""
    return [mean_square(v - rows.target) for v in (rows.velocity.detach(), rows.teacher, rows.old)]


def weights_of(rows, beta):
    """sigmoid(S_g) at every row, by a loop over the rows."""
    own, teacher, _ = errors_of(rows)
    weights = []
    for group in GROUPS:
        mine = [row for row in range(6) if GROUPS[row] == group]
        gain = sum(ADVANTAGES[row] * beta * (own[row] - teacher[row]) for row in mine) / len(mine)
        weights.append(1 / (1 + (-gain).exp()))
    return torch.stack(weights)


def stopped_rows(rows, clip_range, limit):
    """(rows without gradient for the average, and for the teacher), as published: a row at a
    time, with the distance of its group.
    """
    own, teacher, old = errors_of(rows)
    distance = mean_square(rows.velocity.detach() - rows.teacher)
    clipped = []
    stopped = []
    for row, advantage in enumerate(ADVANTAGES):
        mine = [other for other in range(6) if GROUPS[other] == GROUPS[row]]
        far = sum(distance[other] for other in mine) / len(mine) > limit
        ratio = (old[row] - own[row]).exp()
        beside = (teacher[row] - own[row]).exp()
        if advantage > 0:
            clipped.append(bool(ratio > 1 + clip_range))
            stopped.append(bool(far and beside > 1))
        else:
            clipped.append(bool(ratio < 1 - clip_range))
            stopped.append(bool(far and beside < 1))
    return torch.tensor(clipped), torch.tensor(stopped)


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_of_the_surrogate_is_the_published_formula(seed):
    rows = surrogate_rows(seed, near=0.2)
    config = TDMR1Config(beta=3.0, teacher_weight=0.2, **OPEN)
    loss, metrics = compute_surrogate_loss(rows, config)
    own, teacher, _ = errors_of(rows)
    weights = weights_of(rows, 3.0)
    assert (weights - 0.5).abs().min() > 1e-3
    distance = mean_square(rows.velocity - rows.teacher)
    expected = doubles(SHARES) * (weights * rows.advantage * own + 0.2 * distance)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(metrics["weight"], weights, rtol=1e-12, atol=0)
    torch.testing.assert_close(metrics["change"], own - teacher, rtol=1e-12, atol=1e-14)

    (gradient,) = torch.autograd.grad(loss.sum(), rows.velocity)
    preference = wide(weights * rows.advantage) * 2 * (rows.velocity - rows.target)
    pull = 0.2 * 2 * (rows.velocity - rows.teacher)
    expected = wide(doubles(SHARES)) * (preference + pull) / ELEMENTS
    torch.testing.assert_close(gradient, expected.detach(), rtol=1e-12, atol=1e-14)


def test_rows_that_have_moved_far_enough_keep_the_pull_to_the_teacher_alone():
    seen = torch.zeros(2, dtype=torch.int64)
    for seed in range(8):
        rows = surrogate_rows(seed, near=0.2)
        config = TDMR1Config(beta=3.0, clip_range=0.05, teacher_weight=0.2, teacher_limit=0.08)
        clipped, stopped = stopped_rows(rows, 0.05, 0.08)
        seen += torch.stack([clipped.sum(), stopped.sum()])
        loss, metrics = compute_surrogate_loss(rows, config)
        assert metrics["clipped"].tolist() == clipped.double().tolist()
        assert metrics["stopped"].tolist() == stopped.double().tolist()
        (gradient,) = torch.autograd.grad(loss.sum(), rows.velocity)
        preference = wide(weights_of(rows, 3.0) * rows.advantage * ~(clipped | stopped))
        preference = preference * 2 * (rows.velocity - rows.target)
        pull = 0.2 * 2 * (rows.velocity - rows.teacher)
        expected = wide(doubles(SHARES)) * (preference + pull) / ELEMENTS
        torch.testing.assert_close(gradient, expected.detach(), rtol=1e-12, atol=1e-14)
    assert (seen > 5).all()
    assert (seen < 43).all()  # of 48 rows


def test_the_rows_of_a_group_depend_on_their_own_group_alone():
    rows = surrogate_rows(near=0.2)
    config = TDMR1Config()
    loss, metrics = compute_surrogate_loss(rows, config)
    for part in (slice(0, 2), slice(2, 6)):
        names = ("velocity", "target", "teacher", "old", "step_share", "advantage", "group_index")
        some = replace(rows, **{name: getattr(rows, name)[part] for name in names})
        alone, alone_metrics = compute_surrogate_loss(some, config)
        torch.testing.assert_close(alone, loss[part], rtol=1e-12, atol=1e-14)
        for name, values in alone_metrics.items():
            torch.testing.assert_close(values, metrics[name][part].to(values))


@pytest.mark.parametrize("weight", [0.7, 0.3])
def test_the_gradient_of_the_student_is_half_the_published_one(weight):
    """``loss_kl + tdm_weight * loss_cfg_reward + (1 - tdm_weight) * loss_reward`` without Huber,
    each (revised_x0 - x0).square() / mean|x0 - prediction|; our squares are halved.
    """
    rows = matching_rows(doubles([0.1, 0.3, 0.5, 0.7, 0.8, 0.9]))
    # Velocities with and without the prompt; a guidance of 4.5 whose part counts tdm_weight is one
    # of 1 + 3.5 tdm_weight.
    conditional, unconditional = normal(2, 6, *SHAPE, seed=90)
    guided = conditional + 3.5 * (1 - weight) * (conditional - unconditional)
    rows = replace(rows, copies={"teacher": guided, "fake": rows.copies["fake"]})
    loss, metrics = compute_loss(rows, TDMR1Config(reward_weight=weight))
    (on_velocity,) = torch.autograd.grad(loss.sum(), rows.velocity)

    level = wide(rows.noised_sigma)
    x0 = rows.predicted_clean.detach().requires_grad_()
    kept = x0.detach()
    predictions = (conditional, unconditional, rows.copies["fake"], guided)
    cond, uncond, fake, real = (rows.noised - level * v for v in predictions)
    scale = (kept - real).abs().mean((1, 2), keepdim=True)
    reward_scale = (kept - rows.rewarded_clean).abs().mean((1, 2), keepdim=True)
    loss_kl = ((kept + cond - fake) - x0).square() / scale
    loss_cfg = ((kept + 3.5 * (cond - uncond)) - x0).square() / scale
    loss_reward = ((kept + rows.rewarded_clean - rows.base_clean) - x0).square() / reward_scale
    published = loss_kl + (1 - weight) * loss_cfg + weight * loss_reward
    (on_clean,) = torch.autograd.grad(published.mean((1, 2)).sum(), x0)
    expected = on_clean / 2 * -wide(rows.sigma)  # d x0 / d v = -sigma
    torch.testing.assert_close(on_velocity, expected, rtol=1e-10, atol=1e-14)
    shift = (rows.base_clean - rows.rewarded_clean).abs().mean((1, 2))
    torch.testing.assert_close(
        metrics["matching/reward_gradient"], shift / reward_scale[:, 0, 0], rtol=1e-12, atol=0
    )


def test_a_surrogate_that_is_its_teacher_leaves_the_student_to_tdm():
    rows = matching_rows(doubles([0.1, 0.3, 0.5, 0.7, 0.8, 0.9]))
    rows = replace(rows, base_clean=rows.rewarded_clean)
    loss, _ = compute_loss(rows, TDMR1Config())
    torch.testing.assert_close(loss, tdm.ALGORITHM.loss(rows, TDMConfig())[0], rtol=1e-12, atol=0)


def test_an_algorithm_has_a_surrogate_loss_where_its_hyper_parameters_have_a_surrogate():
    assert ALGORITHM.list_following_copies(TDMR1Config()) == ("fake", "surrogate", "surrogate_old")
    with pytest.raises(ValueError, match="TDMR1Config: .* give both or none"):
        Algorithm(TDMR1Config, compute_loss)
    with pytest.raises(ValueError, match="TDMConfig: .* give both or none"):
        Algorithm(TDMConfig, compute_loss, surrogate_loss=compute_surrogate_loss)
