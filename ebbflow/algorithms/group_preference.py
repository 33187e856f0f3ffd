"""What the group preferences of DGPO (2510.08425) and TDM-R1 (2603.07700) share: how much a group
still has to gain, and which of its rows have moved far enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbflow.algorithms.base import compute_group_mean

if TYPE_CHECKING:
    from torch import Tensor


def compute_group_weight(
    change: Tensor, advantage: Tensor, group_index: Tensor, beta: float
) -> Tensor:
    """Compute sigmoid(S_g), S_g = mean over the group of A beta (d - d_ref), the same at all rows
    of a group, [M].

    It is 1/2 at the reference, near 0 once the better samples have improved against the worse ones,
    near 1 where they have fallen behind.

    Args:
        change: d - d_ref without gradient, [M].
        group_index: integer [M], ascending.
    """
    return compute_group_mean(advantage * beta * change, group_index).sigmoid()


def find_clipped_rows(
    error: Tensor, old_error: Tensor, advantage: Tensor, clip_range: float
) -> Tensor:
    """Find the rows that are further from the old error than the clip range and move away, bool
    [M]: those with rho > 1 + eps and A > 0, or rho < 1 - eps and A <= 0; rho = exp(d_old - d).
    """
    # rho rises as the error falls, hence d_old - d.
    ratio = (old_error - error.detach()).exp()
    return (ratio > 1 + clip_range).where(advantage > 0, ratio < 1 - clip_range)
