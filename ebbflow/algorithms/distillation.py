r"""On-policy distillation: on the policy's own trajectories, every trained step is pulled to the teacher's.

    L = mean over the terms of mean((mu - mu_teacher)^2) / (2 b^2)

The rewards are watched, not learnt from, so groups without variance are trained on as well.
"""

from __future__ import annotations

from torch import Tensor

from ebbflow.algorithms import units
from ebbflow.algorithms.base import Algorithm, Rows, TrajectoryTerms, gaussian_kl
from ebbflow.algorithms.policy_gradient import ratio_metrics
from ebbflow.recipe.algorithms import Distillation


def loss(terms: TrajectoryTerms, config: Distillation) -> tuple[Tensor, Rows]:
    """Loss and metrics of each term, [M]."""
    divergence = gaussian_kl(terms.transition, terms.copies["teacher"].mean)
    return divergence, ratio_metrics(terms) | {"kl/teacher": divergence}


ALGORITHM = Algorithm(Distillation, loss, copies=lambda config: frozenset({"teacher"}), select=units.everything)
