r"""On-policy distillation: on the policy's own trajectories, every trained step is pulled to the teacher's.

    L = mean over the rows of mean((mu - mu_teacher)^2) / (2 b^2)

The rewards are watched, not learnt from, so groups without variance are trained on as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ebbflow.algorithms import grouping
from ebbflow.algorithms.base import Algorithm, RowMetrics, TrajectoryRows, gaussian_kl
from ebbflow.algorithms.policy_gradient import ratio_metrics
from ebbflow.recipe.algorithms import TrajectoryConfig
from ebbflow.recipe.paths import PathText

if TYPE_CHECKING:
    from torch import Tensor


class DistillationConfig(TrajectoryConfig):
    """On-policy distillation: the policy's own steps are pulled to a teacher's; no reward is learnt from."""

    name: Literal["distillation"] = "distillation"
    teacher: PathText = Field(min_length=1)
    """Policy folder (or URI) of the teacher, trained from the same base model with the same ``policy``."""


def loss(rows: TrajectoryRows, config: DistillationConfig) -> tuple[Tensor, RowMetrics]:
    """Loss and metrics of each row, [M]."""
    divergence = gaussian_kl(rows.transition, rows.copies["teacher"].mean)
    return divergence, ratio_metrics(rows) | {"kl/teacher": divergence}


ALGORITHM = Algorithm(DistillationConfig, loss, copies=lambda config: frozenset({"teacher"}), select=grouping.all_samples)
