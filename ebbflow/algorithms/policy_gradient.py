"""What the clipped policy gradients share.

rho = exp(log_prob - old_log_prob),   clipped loss = max(-A rho, -A clip(rho, 1 - eps, 1 + eps))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ebbflow.algorithms.base import RowMetrics, TrajectoryRows

if TYPE_CHECKING:
    from torch import Tensor


def clipped(ratio: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
    """The clipped loss of each row, [M] (PPO, 1707.06347)."""
    return (-advantage * ratio).maximum(-advantage * ratio.clamp(1 - clip_range, 1 + clip_range))


def clip_metrics(ratio: Tensor, advantage: Tensor, clip_range: float) -> RowMetrics:
    """Which rows have no gradient because their ratio went far enough already: up for good samples, down for bad ones."""
    return {
        "clip/up": ((ratio > 1 + clip_range) & (advantage > 0)).float(),
        "clip/down": ((ratio < 1 - clip_range) & (advantage < 0)).float(),
    }


def dead_share(means: Mapping[str, float]) -> float:
    """The share of the terms that have no gradient because of a clip or a divergence limit, from the means of the metrics."""
    return sum(means.get(name, 0.0) for name in ("clip/up", "clip/down", "dppo/dropped"))


def ratio_metrics(rows: TrajectoryRows) -> RowMetrics:
    """How far the policy has moved from the one that the ratio is against."""
    difference = rows.log_prob - rows.old_log_prob
    ratio = difference.exp()
    return {"ratio/mean": ratio, "ratio/deviation": (ratio - 1).abs(), "kl/old": 0.5 * difference**2}
