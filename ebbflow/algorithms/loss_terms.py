r"""The terms that losses share: the clipped policy gradient, and the penalty for leaving the base
model.

The clipped policy gradient, with eps the ``clip_range`` of the algorithm and A the advantage of the
row:

    rho = exp(log_prob - old_log_prob)
    L   = max(-A rho, -A clip(rho, 1 - eps, 1 + eps))        (PPO, 1707.06347, equation 7)

The penalty, which a stage chooses beside the algorithm (``reference``):

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

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ebbflow.algorithms.base import (
    AnyRows,
    CopyName,
    RowMetrics,
    TrajectoryRows,
    compute_gaussian_kl,
    mean_per_row,
)
from ebbflow.recipe.algorithms import GROUP_SIZE, SUM_OF_REWARDS, PublishedSetting
from ebbflow.recipe.choices import ReferenceConfig

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


def compute_clipped_loss(
    ratio: Tensor, advantage: Tensor, clip_range: float
) -> tuple[Tensor, RowMetrics]:
    """Compute the clipped loss of each row, [M] (PPO, 1707.06347), and mark in its metrics the rows
    that have no gradient because their ratio went far enough already: up for good samples, down
    for bad ones.
    """
    # The larger loss: a ratio beyond the clip has no gradient where it lowers the loss further, and
    # keeps it where it has gone the wrong way.
    loss = (-advantage * ratio).maximum(-advantage * ratio.clamp(1 - clip_range, 1 + clip_range))
    return loss, {
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


ADAPTIVE_FLOOR = 1e-4
"""Weight of the penalty of the worst rows, as published."""


def compute_penalty(
    config: ReferenceConfig,
    rows: AnyRows,
    velocity: Tensor,
    reference: Tensor,
    copy: CopyName,
) -> tuple[Tensor, Tensor]:
    """Compute the penalty of each row before its weight, and its weight, both [M].

    Args:
        velocity: of the policy, [M, ...].
        reference: the velocity of the reference at the same points, [M, ...].
        copy: the policy copy that it is of (``ReferenceConfig.copy_name``).
    """
    if config.penalty == "velocity":
        divergence = mean_per_row((velocity - reference) ** 2)
    else:
        # The recipe allows a KL for trajectories alone.
        assert isinstance(rows, TrajectoryRows)
        divergence = compute_gaussian_kl(rows.transition, rows.copies[copy].mean)
        # b^2 = s^2 |dt|, so 1 / (2 s^2) = |dt| / (2 b^2). The b of cps has no dt to take out.
        if config.penalty == "kl_without_dt" and rows.transition.sampler.std_has_dt:
            divergence = divergence * rows.transition.dt.abs()
    # A factor of 0 leaves the row free; the others make up for it, so that the mean is over them.
    if isinstance(rows, TrajectoryRows) and rows.penalty_factor is not None:
        divergence = rows.penalty_factor * divergence
    if not config.adaptive:
        return divergence, rows.advantage.new_full(rows.advantage.shape, config.weight)
    # 1e-4 + (k - 1e-4) p: the better a sample scores, the heavier its penalty, against hacked
    # rewards.
    preference = (rows.advantage / (2 * rows.advantage_clip) + 0.5).clamp(0, 1)
    return divergence, ADAPTIVE_FLOOR + (config.weight - ADAPTIVE_FLOOR) * preference
