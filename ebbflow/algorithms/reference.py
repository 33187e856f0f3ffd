r"""The pull back to the base model, a choice of its own beside the algorithm.

kl             mean((mu - mu_ref)^2) / (2 b^2)      b: the true standard deviation of the step, dt included
kl_without_dt  mean((mu - mu_ref)^2) / (2 s^2)      s = b / sqrt|dt|: the scaling of Flow-GRPO's published code
velocity       mean((v - v_ref)^2)
"""

from __future__ import annotations

from torch import Tensor

from ebbflow.algorithms.base import ForwardRows, TrajectoryRows, gaussian_kl, per_row
from ebbflow.recipe.choices import ReferenceConfig


def penalty(config: ReferenceConfig, rows: TrajectoryRows | ForwardRows, velocity: Tensor, reference: Tensor) -> Tensor:
    """The penalty of each row, [M], before its weight; ``reference`` is the base model's velocity at the same points."""
    if config.penalty == "velocity":
        return per_row((velocity - reference) ** 2)
    assert isinstance(rows, TrajectoryRows)
    divergence = gaussian_kl(rows.transition, rows.copies["reference"].mean)
    return divergence if config.penalty == "kl" else divergence * rows.transition.dt.abs()
