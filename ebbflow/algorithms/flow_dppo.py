r"""Flow-DPPO: instead of a clipped ratio, a limit on the divergence of each step.

    D_kl = mean((mu - mu_old)^2) / (2 b^2)
    L    = mean -A rho,   without the rows that are at the limit and move further away:
           D_kl >= tau and ((rho > 1 and A > 0) or (rho < 1 and A < 0))

A dropped row counts as 0 in the mean, as a clipped one has no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ebbflow.algorithms.base import Algorithm, RowMetrics, TrajectoryRows, gaussian_kl
from ebbflow.algorithms.policy_gradient import ratio_metrics
from ebbflow.recipe.algorithms import FlowDPPOConfig


def loss(rows: TrajectoryRows, config: FlowDPPOConfig) -> tuple[Tensor, RowMetrics]:
    """Loss and metrics of each row, [M]."""
    ratio = torch.exp(rows.log_prob - rows.old_log_prob)
    divergence = gaussian_kl(rows.transition, rows.old_mean)
    away = torch.where(rows.advantage > 0, ratio > 1, ratio < 1) & (rows.advantage != 0)
    dropped = away & (divergence >= config.divergence_limit)
    metrics = ratio_metrics(rows) | {"dppo/divergence": divergence, "dppo/dropped": dropped.float()}
    return torch.where(dropped, 0.0, -rows.advantage * ratio), metrics


ALGORITHM = Algorithm(FlowDPPOConfig, loss)
