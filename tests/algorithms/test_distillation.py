"""On-policy distillation against the KL divergence of two Gaussians."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_rows import (
    DENSITIES,
    ELEMENTS,
    SHAPE,
    STOCHASTIC,
    gaussian,
    gradient,
    kl_per_element,
    moved,
    normal,
    rollout,
)

from ebbflow.algorithms.base import TrajectoryRows
from ebbflow.algorithms.built_in.distillation import ALGORITHM, DistillationConfig

CONFIG = DistillationConfig(teacher="somewhere")


@pytest.mark.parametrize("sampler", STOCHASTIC)
def test_the_loss_is_the_divergence_from_the_teacher_per_element(sampler):
    made = rollout(sampler)
    rows = made.rows(moved(made), teacher=normal(*made.old.shape, seed=9))
    loss, metrics = ALGORITHM.loss(rows, CONFIG)
    torch.testing.assert_close(
        loss, kl_per_element(rows.transition, rows.copies["teacher"]), rtol=1e-12, atol=0
    )
    assert torch.equal(metrics["kl/teacher"], loss)


@pytest.mark.parametrize("sampler", STOCHASTIC)
def test_the_teacher_itself_has_nothing_to_learn(sampler):
    made = rollout(sampler)
    leaf = moved(made)
    rows = made.rows(leaf, teacher=leaf.detach())
    assert (ALGORITHM.loss(rows, CONFIG)[0] == 0).all()
    assert (gradient(ALGORITHM, rows, CONFIG, leaf) == 0).all()


def test_the_gradient_points_from_the_teacher_to_the_policy():
    mean = normal(5, *SHAPE, seed=0).requires_grad_()
    teacher = normal(5, *SHAPE, seed=1)
    zeros = torch.zeros(5, dtype=torch.float64)
    rows = TrajectoryRows(
        gaussian(mean, 0.3), zeros, mean.detach(), zeros, {"teacher": gaussian(teacher, 0.3)}, zeros
    )
    expected = (mean.detach() - teacher) / (ELEMENTS * 0.3**2)
    torch.testing.assert_close(
        gradient(ALGORITHM, rows, CONFIG, mean), expected, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("sampler", DENSITIES)
def test_loss_gradient_equals_finite_differences(sampler):
    made = rollout(sampler)
    teacher = normal(*made.old.shape, seed=9)

    def loss(values):
        return ALGORITHM.loss(made.rows(values, teacher=teacher), CONFIG)[0]

    assert torch.autograd.gradcheck(loss, (moved(made),), eps=1e-6, atol=1e-6)


def test_rewards_teach_nothing_and_leave_no_sample_out():
    made = rollout()
    teacher = normal(*made.old.shape, seed=9)
    rows = made.rows(moved(made), teacher=teacher)
    praised = replace(rows, advantage=rows.advantage + 3)
    assert torch.equal(ALGORITHM.loss(rows, CONFIG)[0], ALGORITHM.loss(praised, CONFIG)[0])
    units = ALGORITHM.select(np.zeros(3), np.zeros(3, bool), np.array([4, 4, 4]), CONFIG)
    assert [unit.tolist() for unit in units] == [[0], [1], [2]]
    assert ALGORITHM.copies(CONFIG) == {"teacher"}
