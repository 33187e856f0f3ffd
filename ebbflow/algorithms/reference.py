r"""The pull back to the base model, a choice of its own beside the algorithm.

kl             mean((mu - mu_ref)^2) / (2 b^2)      b: the true standard deviation of the step, dt included
kl_without_dt  mean((mu - mu_ref)^2) / (2 s^2)      s = b / sqrt|dt|: the scaling of Flow-GRPO's published code
velocity       mean((v - v_ref)^2)
"""

from __future__ import annotations

from torch import Tensor

from ebbflow.algorithms.base import ForwardTerms, TrajectoryTerms, gaussian_kl, per_term
from ebbflow.recipe.choices import Reference


def penalty(config: Reference, terms: TrajectoryTerms | ForwardTerms, velocity: Tensor, reference: Tensor) -> Tensor:
    """The penalty of each term, [M], before its weight; ``reference`` is the base model's velocity at the same points."""
    if config.penalty == "velocity":
        return per_term((velocity - reference) ** 2)
    assert isinstance(terms, TrajectoryTerms)
    divergence = gaussian_kl(terms.transition, terms.copies["reference"].mean)
    return divergence if config.penalty == "kl" else divergence * terms.transition.dt.abs()
