r"""Flow-DPPO: instead of a clipped ratio, a limit on the divergence of each step.

    D_kl = mean((mu - mu_old)^2) / (2 b^2)
    L    = mean -A rho,   without the rows that are at the limit and move further away:
           D_kl >= tau and ((rho > 1 and A > 0) or (rho < 1 and A < 0))

A dropped row counts as 0 in the mean, as a clipped one has no gradient.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ebbflow.algorithms.base import Algorithm, RowMetrics, TrajectoryRows, gaussian_kl
from ebbflow.algorithms.policy_gradient import ratio_metrics
from ebbflow.recipe.algorithms import TrajectoryConfig

if TYPE_CHECKING:
    from torch import Tensor


class FlowDPPOConfig(TrajectoryConfig):
    """Policy gradient that drops the rows which move further away than a divergence allows, instead of clipping a ratio."""

    name: Literal["flow_dppo"] = "flow_dppo"
    divergence_limit: float = Field(1e-5, gt=0)
    """tau: the largest mean((mu - mu_old)^2) / (2 b^2) of a term that still moves away from the old policy."""

    def ratio_range(self, dims: int) -> float:
        """sqrt(2 tau / D): a shift of the means with D_kl = tau spreads the mean log-prob by this."""
        return math.sqrt(2 * self.divergence_limit / dims)


def loss(rows: TrajectoryRows, config: FlowDPPOConfig) -> tuple[Tensor, RowMetrics]:
    """Loss and metrics of each row, [M]."""
    ratio = (rows.log_prob - rows.old_log_prob).exp()
    divergence = gaussian_kl(rows.transition, rows.old_mean)
    away = (ratio > 1).where(rows.advantage > 0, ratio < 1) & (rows.advantage != 0)
    dropped = away & (divergence >= config.divergence_limit)
    metrics = ratio_metrics(rows) | {"dppo/divergence": divergence, "dppo/dropped": dropped.float()}
    return (-rows.advantage * ratio).where(~dropped, 0.0), metrics


ALGORITHM = Algorithm(FlowDPPOConfig, loss)
