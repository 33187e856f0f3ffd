"""From rewards to advantages: A = (R - group mean) / (std + 1e-4), on sample-level rewards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ebbflow.recipe.stages import Advantages

EPSILON = 1e-4


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages of N samples.

    Attributes:
        values: float32 [N], clamped; 0 where ``keep`` is False.
        keep: bool [N]; False for samples without a score and for groups that say nothing (one scored sample, or no variance).
        metrics: statistics of rewards, groups and advantages.
    """

    values: np.ndarray
    keep: np.ndarray
    metrics: dict[str, float]


def compute_advantages(rewards: np.ndarray, prompt_ids: np.ndarray, config: Advantages) -> AdvantageResult:
    """Group-relative advantages; a group is all samples of one prompt.

    Args:
        rewards: float64 [N]; NaN where scoring failed (masked, not a score).
        prompt_ids: integer [N].
    """
    scored = np.isfinite(rewards)
    _, group = np.unique(prompt_ids, return_inverse=True)
    count = np.bincount(group, weights=scored)
    known = np.where(scored, rewards, 0.0)
    mean = np.bincount(group, weights=known) / np.maximum(count, 1)
    centred = np.where(scored, rewards - mean[group], 0.0)
    variance = np.bincount(group, weights=centred**2) / np.maximum(count - 1, 1)
    # A spread below float noise is no spread: equal rewards must not become advantages.
    informative = (count > 1) & (np.sqrt(variance) > 1e-8)
    keep = scored & informative[group]
    std = _std(config, rewards[scored], variance)[group]
    values = np.where(keep, centred / (std + EPSILON), 0.0).clip(-config.clip, config.clip).astype(np.float32)
    return AdvantageResult(values, keep, _metrics(rewards[scored], len(rewards), count, informative, values[keep]))


def _std(config: Advantages, scored_rewards: np.ndarray, group_variance: np.ndarray) -> np.ndarray:
    """The divisor of each group, [groups]."""
    if config.std == "group":
        return np.sqrt(group_variance)
    if config.std == "global":
        return np.full_like(group_variance, scored_rewards.std(ddof=1) if len(scored_rewards) > 1 else 0.0)
    return np.full_like(group_variance, 1 - EPSILON)


def _metrics(
    scored_rewards: np.ndarray, samples: int, count: np.ndarray, informative: np.ndarray, kept: np.ndarray
) -> dict[str, float]:
    metrics = {
        "reward/scored_share": len(scored_rewards) / samples,
        "group/size": float(count.mean()),
        "group/zero_std_share": float(1 - informative.mean()),
        "group/dropped_samples": float(samples - len(kept)),
    }
    if len(scored_rewards):
        metrics |= {
            "reward/mean": float(scored_rewards.mean()),
            "reward/min": float(scored_rewards.min()),
            "reward/max": float(scored_rewards.max()),
            "reward/std": float(scored_rewards.std()),
        }
    if len(kept):
        metrics |= {
            "advantage/mean": float(kept.mean()),
            "advantage/std": float(kept.std()),
            "advantage/max_magnitude": float(np.abs(kept).max()),
        }
    return metrics
