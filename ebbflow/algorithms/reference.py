r"""The penalty for leaving the base model, which a stage chooses beside the algorithm.

    kl              mean((mu - mu_ref)^2) / (2 b^2)
    kl_without_dt   mean((mu - mu_ref)^2) / (2 s^2)
    velocity        mean((v - v_ref)^2)

b is the true standard deviation of the step, dt included; s = b / sqrt|dt| is the scaling of
Flow-GRPO's published code; v_ref is under classifier-free guidance, if the stage says so.

Under cps, whose published std has no dt, ``kl_without_dt`` divides by 2 b^2, as ``kl`` does.

Its weight k is the same for all rows, or ``adaptive`` (CRD, 2603.14128): 1e-4 + (k - 1e-4) p with p
= A / (2 c) + 1/2 in [0, 1] and c = ``advantages.clip``.

With ``reset_every`` or ``reset_above``, mu_ref and v_ref are those of a copy of the policy that is
renewed from time to time. An algorithm that gates the penalty (GARDO, 2512.24138) multiplies it
with a factor for each sample.
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
    """Compute the penalty of each row, [M], before its weight; ``reference`` is the velocity of
    the reference at the same points, [M, ...].
    """
    if config.penalty == "velocity":
        divergence = mean_per_row((velocity - reference) ** 2)
    else:
        # The recipe allows a KL for trajectories alone.
        assert isinstance(rows, TrajectoryRows)
        divergence = compute_gaussian_kl(rows.transition, rows.copies[config.copy_name].mean)
        # b^2 = s^2 |dt|, so 1 / (2 s^2) = |dt| / (2 b^2). The b of cps has no dt to take out.
        if config.penalty == "kl_without_dt" and rows.transition.sampler.std_has_dt:
            divergence = divergence * rows.transition.dt.abs()
    # A factor of 0 leaves the row free; the others make up for it, so that the mean is over them.
    if isinstance(rows, TrajectoryRows) and rows.penalty_factor is not None:
        return rows.penalty_factor * divergence
    return divergence


def compute_penalty_weight(config: ReferenceConfig, rows: AnyRows) -> Tensor:
    """Compute the weight of each row's penalty, [M]."""
    if not config.adaptive:
        return torch.full_like(rows.advantage, config.weight)
    # 1e-4 + (k - 1e-4) p: the better a sample scores, the heavier its penalty, against hacked
    # rewards.
    preference = (rows.advantage / (2 * rows.advantage_clip) + 0.5).clamp(0, 1)
    return ADAPTIVE_FLOOR + (config.weight - ADAPTIVE_FLOOR) * preference
