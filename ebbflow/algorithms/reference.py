r"""The pull back to the base model, a choice of its own beside the algorithm.

kl             mean((mu - mu_ref)^2) / (2 b^2)      b: the true standard deviation of the step, dt
included kl_without_dt  mean((mu - mu_ref)^2) / (2 s^2)      s = b / sqrt|dt|: the scaling of
Flow-GRPO's published code velocity       mean((v - v_ref)^2)             v_ref under
classifier-free guidance, if the stage says so

Under cps, whose published std has no dt, ``kl_without_dt`` divides by 2 b^2, as ``kl`` does.

Its weight k is the same for all rows, or ``adaptive`` (CRD, 2603.14128): 1e-4 + (k - 1e-4) p with p
= A / (2 c) + 1/2 in [0, 1] and c = ``advantages.clip``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ebbflow.algorithms.base import AnyRows, TrajectoryRows, compute_gaussian_kl, mean_per_row
from ebbflow.recipe.choices import ReferenceConfig

ADAPTIVE_FLOOR = 1e-4
"""Weight of the penalty of the worst rows, as published."""


def compute_penalty(
    config: ReferenceConfig, rows: AnyRows, velocity: Tensor, reference: Tensor
) -> Tensor:
    """The penalty of each row, [M], before its weight; ``reference`` is the base model's velocity
    at the same points.
    """
    if config.penalty == "velocity":
        return mean_per_row((velocity - reference) ** 2)
    assert isinstance(rows, TrajectoryRows)
    divergence = compute_gaussian_kl(rows.transition, rows.copies["reference"].mean)
    std_has_dt = rows.transition.sampler.std_has_dt
    return (
        divergence * rows.transition.dt.abs()
        if config.penalty == "kl_without_dt" and std_has_dt
        else divergence
    )


def compute_penalty_weight(config: ReferenceConfig, rows: AnyRows) -> Tensor:
    """The weight of each row's penalty, [M]."""
    if not config.adaptive:
        return torch.full_like(rows.advantage, config.weight)
    preference = (rows.advantage / (2 * rows.advantage_clip) + 0.5).clamp(0, 1)
    return ADAPTIVE_FLOOR + (config.weight - ADAPTIVE_FLOOR) * preference
