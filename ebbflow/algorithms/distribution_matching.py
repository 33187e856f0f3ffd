r"""Distribution matching distillation in the flow parameterisation: what DMD2 and TDM share.

A student samples in few steps. Its sample x0_hat = x - sigma v, predicted at one of these steps,
gets noise again, up to x_t at the noise level t. There the real score s_real (of a teacher that
samples in many steps) and the fake score s_fake (of a network that is trained beside the student,
on the student's samples) are compared. The gradient of KL(student || teacher) with respect to
x0_hat is w (s_fake - s_real) (DMD, 2311.18828, equations 7 and 8), in its published code with w =
t^2 / (1 - t) / mean|x0_hat - x0_real|.

With x_t = (1 - t) x0 + t eps and v = eps - x0, a velocity predicts x0 = x_t - t v, and its score is
s = -(x_t - (1 - t) (x_t - t v)) / t^2 = -(x_t + (1 - t) v) / t. So s_fake - s_real = (1 - t) / t
(v_real - v_fake), and

    g = t (v_real - v_fake) / mean|x0_hat - (x_t - t v_real)|
    L = mean((x0_hat - sg(x0_hat - g))^2) / 2

g is the gradient of L with respect to x0_hat, times the number of elements. The fake score is
trained on the noise that was added (``ebbflow.flow.renoising``); for DMD2 that is flow matching on
x0_hat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbflow.algorithms.base import (
    Algorithm,
    MatchingRows,
    RowMetrics,
    expand_like,
    mean_per_row,
    select_all_samples,
)
from ebbflow.recipe.algorithms import MatchingConfig

if TYPE_CHECKING:
    from torch import Tensor

TINY = 1e-5
"""The least divisor: the published code turns 0 / 0 into 0."""


def compute_gradient(rows: MatchingRows) -> tuple[Tensor, Tensor]:
    """Return (g, [M, ...], and what it was divided by, the mean distance to the teacher's
    prediction, [M]), without gradient.
    """
    clean = rows.predicted_clean.detach()
    sigma = expand_like(rows.noised_sigma, rows.noised)  # t
    real = rows.copies["teacher"]
    fake = rows.copies["fake"]

    # g = t (v_real - v_fake) / mean|x0_hat - x0_real| with x0_real = x_t - t v_real. The divisor
    # makes the step as long for a sample that is far from the teacher's as for one that is near.
    distance = mean_per_row((clean - (rows.noised - sigma * real)).abs()).clamp_min(TINY)
    return sigma * (real - fake) / expand_like(distance, clean), distance


def compute_loss(rows: MatchingRows, config: MatchingConfig) -> tuple[Tensor, RowMetrics]:
    """Compute the loss and the metrics of each row, [M]."""
    direction, distance = compute_gradient(rows)
    clean = rows.predicted_clean
    # L = mean((x0_hat - sg(x0_hat - g))^2) / 2. Its value says nothing of the distance between the
    # distributions; only its gradient, g over the number of elements, is meant.
    total = mean_per_row((clean - (clean.detach() - direction)) ** 2) / 2
    return total, {
        "matching/distance": distance,
        "matching/gradient": mean_per_row(direction.abs()),
    }


def build_matching_algorithm(config: type[MatchingConfig]) -> Algorithm:
    """Build the algorithm of a class of hyper-parameters."""
    return Algorithm(
        config,
        compute_loss,
        copies=lambda config: frozenset({"teacher", "fake"}),
        # Rewards are watched, not learnt from: groups without variance count, too.
        select=select_all_samples,
    )
