"""What the clipped policy gradients share.

    rho = exp(log_prob - old_log_prob)
    L   = max(-A rho, -A clip(rho, 1 - eps, 1 + eps))        (PPO, 1707.06347, equation 7)

eps is the ``clip_range`` of the algorithm, A the advantage of the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ebbflow.algorithms.base import RowMetrics, TrajectoryRows
from ebbflow.recipe.algorithms import GROUP_SIZE, SUM_OF_REWARDS, PublishedSetting

if TYPE_CHECKING:
    from torch import Tensor

BASE = "yifan123/flow_grpo config/base.py"


def published_flow_grpo_settings(source: str) -> dict[str, PublishedSetting]:
    """Return the published settings of an algorithm on top of Flow-GRPO's code that are
    Flow-GRPO's.

    Args:
        source: the algorithm's own configuration.
    """
    return {
        "sampler.name": PublishedSetting("flow_sde", source, "eta .7"),
        "advantages.std": PublishedSetting(
            "global", source, "its variance divides by n, here by n - 1"
        ),
        "advantages.combine": PublishedSetting(
            "sum", "yifan123/flow_grpo flow_grpo/rewards.py", deviation=SUM_OF_REWARDS
        ),
        "advantages.clip": PublishedSetting(5.0, BASE),
        "optimizer.lr": PublishedSetting(3e-4, BASE, "of LoRA adapters"),
        "optimizer.weight_decay": PublishedSetting(1e-4, BASE),
        "optimizer.max_grad_norm": PublishedSetting(1.0, BASE),
        "updates_per_step": PublishedSetting(2, source),
        "group_size": PublishedSetting(24, source, deviation=GROUP_SIZE),
    }


def compute_clipped_loss(ratio: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
    """Compute the clipped loss of each row, [M] (PPO, 1707.06347)."""
    # The larger loss: a ratio beyond the clip has no gradient where it lowers the loss further, and
    # keeps it where it has gone the wrong way.
    return (-advantage * ratio).maximum(-advantage * ratio.clamp(1 - clip_range, 1 + clip_range))


def compute_clip_metrics(ratio: Tensor, advantage: Tensor, clip_range: float) -> RowMetrics:
    """Mark the rows that have no gradient because their ratio went far enough already: up for good
    samples, down for bad ones.
    """
    return {
        "clip/up": ((ratio > 1 + clip_range) & (advantage > 0)).float(),
        "clip/down": ((ratio < 1 - clip_range) & (advantage < 0)).float(),
    }


def compute_dead_share(means: Mapping[str, float]) -> float:
    """Compute the share of the terms that have no gradient because of a clip or a divergence limit,
    from the means of the metrics.
    """
    # An algorithm has one of the two, and a user's own may have neither.
    return sum(means.get(name, 0.0) for name in ("clip/up", "clip/down", "dppo/dropped"))


def compute_ratio_metrics(rows: TrajectoryRows) -> RowMetrics:
    """Measure how far the policy has moved from the one that the ratio is against."""
    difference = rows.log_prob - rows.old_log_prob
    ratio = difference.exp()
    # kl/old is k2, half the squared difference of mean log-probs, as in Flow-GRPO's code
    # (approx_kl); it is no KL between densities.
    return {
        "ratio/mean": ratio,
        "ratio/deviation": (ratio - 1).abs(),
        "kl/old": 0.5 * difference**2,
    }
