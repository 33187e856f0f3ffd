r"""From rewards to advantages, on sample-level rewards R_k of K rewards with weights w_k:

    z(R) = (R - baseline) / (std + 1e-4)                inside the group of a prompt
    A    = z(sum_k w_k R_k)                             combine = "sum" (Flow-GRPO, 2505.05470)
    A    = sum_k w_k z(R_k)                             combine = "per_reward" (MixGRPO, 2507.21802)

baseline: the mean of the group; with ``trim`` the mean of what is left without floor(trim * count)
rewards at either end; with ``running`` the mean over all samples of the prompt so far. std
(unbiased): of the whole batch; of the group, with ``running`` of the prompt so far; or none, a
divisor of 1. All are over samples: over rewards repeated for each denoising step the std shrinks.

A reward that scores some prompt sets only has no part in the sums of the other prompts.

Of a tree (BranchGRPO, 2509.06040) the same, for the nodes after each denoising step by themselves,
with

    R(node) = mean of R over its leaves
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ebbflow.recipe.choices import AdvantagesConfig
from ebbflow.recipe.rewards import MAX_SCORE

EPSILON = 1e-4

NO_SPREAD = 1e-8
"""A spread below float noise is none: equal rewards must not become advantages."""


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages of N samples.

    Attributes:
        values: float32 [N], clamped if asked; 0 where ``keep`` is False.
        keep: bool [N]; False for samples without a score, for groups that say nothing (fewer than
            two scores, or no spread), and for the middle of a group where only its extremes are
            trained on.
        metrics: statistics of rewards (their weighted sum), groups and advantages.
        of_steps: of a tree, those of the W trained steps of each sample, float32 [N, W]: of a node
            at its first sample, NaN at the others and where nothing is trained. ``values`` are
            those of the leaves.
    """

    values: np.ndarray
    keep: np.ndarray
    metrics: dict[str, float]
    of_steps: np.ndarray | None = None


@dataclass(frozen=True)
class Moments:
    """Of the rewards of G groups: ``count`` integer [G]; ``mean`` and ``m2``, the sum of squared
    deviations, float64 [G].
    """

    count: np.ndarray
    mean: np.ndarray
    m2: np.ndarray

    @property
    def std(self) -> np.ndarray:
        """Unbiased, [G]; 0 for a group of one."""
        return np.asarray(np.sqrt(self.m2 / np.maximum(self.count - 1, 1)))

    def merge_moments(self, other: Moments) -> Moments:
        """Moments of both sets of samples together (Chan, Golub and LeVeque 1979)."""
        count = self.count + other.count
        difference = other.mean - self.mean
        share = other.count / np.maximum(count, 1)
        return Moments(
            count,
            self.mean + difference * share,
            self.m2 + other.m2 + difference**2 * self.count * share,
        )


class PromptStatistics:
    """Moments of every prompt's rewards over all the steps of a stage so far."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[int, tuple[int, float, float]]] = {}

    def update_moments(self, reward: str, prompt_ids: np.ndarray, batch: Moments) -> Moments:
        """Add a batch, once, and return the moments of its prompts with the batch in them.

        Args:
            reward: whose moments they are.
            prompt_ids: the batch's distinct prompts, integer [G].
            batch: the moments of the batch alone.
        """
        seen = self._seen.setdefault(reward, {})
        prompts = prompt_ids.tolist()
        count, mean, m2 = zip(*(seen.get(prompt, (0, 0.0, 0.0)) for prompt in prompts), strict=True)
        merged = Moments(np.array(count), np.array(mean), np.array(m2)).merge_moments(batch)
        rows = zip(merged.count.tolist(), merged.mean.tolist(), merged.m2.tolist(), strict=True)
        seen.update(zip(prompts, rows, strict=True))
        return merged

    def state_dict(self) -> dict[str, list[list[int | float]]]:
        """For each reward a list of [prompt id, count, mean, m2]; JSON holds it exactly."""
        return {
            reward: [[prompt, *moments] for prompt, moments in seen.items()]
            for reward, seen in self._seen.items()
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, list[list[int | float]]]) -> PromptStatistics:
        """What ``state`` described."""
        statistics = cls()
        for reward, rows in state.items():
            statistics._seen[reward] = {
                int(prompt): (int(count), mean, m2) for prompt, count, mean, m2 in rows
            }
        return statistics


def compute_advantages(
    scores: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    prompt_ids: np.ndarray,
    config: AdvantagesConfig,
    history: PromptStatistics | None = None,
    scored: np.ndarray | None = None,
) -> AdvantageResult:
    """Group-relative advantages; a group is all samples of one prompt.

    Args:
        scores: float64 [N] of each reward; not finite where scoring failed, which masks the sample
            (it is not a score), as does a magnitude above ``MAX_SCORE``.
        weights: of the same rewards, positive.
        prompt_ids: integer [N].
        history: needed by ``config.running``, which adds this batch's scored samples to it: call
            once per batch.
        scored: bool [N], the samples that all rewards of their prompt have scored, so that a NaN
            there is of a reward that their prompt has not. Left out, all prompts have all rewards.

    Raises:
        ValueError: ``config.running`` without a history.
    """
    scored, rewards, total = _select_scored_samples(scores, weights, scored)
    prompts, groups = np.unique(prompt_ids, return_inverse=True)
    group = groups[scored]
    if config.combine == "sum":
        rewards = {"sum": total}
        weights = {"sum": 1.0}

    advantage = np.zeros(len(total))
    informative = np.zeros(len(prompts), bool)
    for name, reward in rewards.items():
        own = np.isfinite(reward)
        normalised, varied = _normalise_rewards(
            name, reward[own], group[own], prompts, config, history
        )
        advantage[own] += weights[name] * normalised
        informative |= varied
    chosen = np.flatnonzero(informative[group])
    if config.keep_extremes is not None:
        chosen = chosen[_is_extreme(advantage[chosen], group[chosen], config.keep_extremes)]

    values = np.zeros(len(groups), np.float32)
    keep = np.zeros(len(groups), np.bool_)
    samples = np.flatnonzero(scored)[chosen]
    values[samples] = (
        advantage[chosen]
        if config.clip is None
        else advantage[chosen].clip(-config.clip, config.clip)
    )
    keep[samples] = True
    return AdvantageResult(
        values, keep, _compute_metrics(total, len(groups), informative, values[keep])
    )


def compute_tree_advantages(
    scores: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    prompt_ids: np.ndarray,
    config: AdvantagesConfig,
    nodes: np.ndarray,
    scored: np.ndarray | None = None,
) -> AdvantageResult:
    """Advantages of every denoising step, among the nodes after it of a prompt; other arguments as
    of ``compute_advantages``.

    A node without other nodes of its prompt says nothing: what is before the first split is not
    trained.

    Args:
        nodes: integer [N, W]; samples of a prompt with the same number are in one node after a
            trained step.
    """
    scored, _, _ = _select_scored_samples(scores, weights, scored)
    of_steps = np.full(nodes.shape, np.nan, np.float32)
    for column, node in enumerate(nodes.T):
        _, first, index = np.unique(
            np.stack([prompt_ids, node]), axis=1, return_index=True, return_inverse=True
        )
        node_of_leaf = index.reshape(-1)[scored]
        fused = {
            name: _mean_of_each_node(scores[name][scored], node_of_leaf, len(first))
            for name in weights
        }
        found = compute_advantages(
            fused,
            weights,
            prompt_ids[first],
            config,
            scored=np.bincount(node_of_leaf, minlength=len(first)) > 0,
        )
        of_steps[first[found.keep], column] = found.values[found.keep]
    leaves = compute_advantages(scores, weights, prompt_ids, config, scored=scored)
    kept = np.asarray(np.isfinite(of_steps).any(axis=1))
    return replace(leaves, keep=kept, of_steps=of_steps)


def find_varied_prompts(
    scores: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    prompt_ids: np.ndarray,
    config: AdvantagesConfig,
    scored: np.ndarray | None = None,
) -> list[int]:
    """The prompts whose samples of this batch score differently, ascending. Arguments as of
    ``compute_advantages``.
    """
    scored, rewards, total = _select_scored_samples(scores, weights, scored)
    prompts, groups = np.unique(prompt_ids, return_inverse=True)
    columns = [total] if config.combine == "sum" else list(rewards.values())
    found = [
        (column[own], groups[scored][own]) for column in columns for own in [np.isfinite(column)]
    ]
    spread = [_compute_moments(column, group, len(prompts)).std for column, group in found]
    varied: list[int] = prompts[np.max(spread, axis=0) > NO_SPREAD].tolist()
    return varied


def compute_reward_moments(
    reward: np.ndarray, prompt_ids: np.ndarray
) -> tuple[np.ndarray, Moments]:
    """(the prompts with a scored sample, integer [G] ascending, moments of their rewards).

    Args:
        reward: float64 [N]; NaN where scoring failed.
        prompt_ids: integer [N].
    """
    scored = np.abs(reward) <= MAX_SCORE
    prompts, group = np.unique(prompt_ids[scored], return_inverse=True)
    return prompts, _compute_moments(reward[scored], group, len(prompts))


def _select_scored_samples(
    scores: Mapping[str, np.ndarray], weights: Mapping[str, float], given: np.ndarray | None
) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
    """(which samples have all scores [N], those scores of each reward [n], their weighted sum [n]).

    Args:
        given: as ``scored`` of ``compute_advantages``; the scores then are NaN where a sample has
            not that reward.
    """
    columns = np.stack([scores[name] for name in weights])
    usable = np.abs(columns) <= MAX_SCORE
    scored = (
        usable.all(axis=0) if given is None else given & (usable | np.isnan(columns)).all(axis=0)
    )
    rewards = {name: scores[name][scored] for name in weights}
    parts = [
        np.where(np.isnan(rewards[name]), 0.0, weight * rewards[name])
        for name, weight in weights.items()
    ]
    return scored, rewards, np.sum(parts, axis=0)


def _mean_of_each_node(values: np.ndarray, node: np.ndarray, nodes: int) -> np.ndarray:
    """The mean of the values of each node, [nodes]; NaN of one without any."""
    count = np.bincount(node, minlength=nodes)
    return np.where(count > 0, np.bincount(node, values, nodes) / np.maximum(count, 1), np.nan)


def _normalise_rewards(
    name: str,
    reward: np.ndarray,
    group: np.ndarray,
    prompts: np.ndarray,
    config: AdvantagesConfig,
    history: PromptStatistics | None,
) -> tuple[np.ndarray, np.ndarray]:
    """(z of each scored sample [n], which groups have scores and a spread [G]); z is 0 in a group
    without a spread.
    """
    batch = moments = _compute_moments(reward, group, len(prompts))
    if config.running:
        if history is None:
            raise ValueError(
                "advantages.running = true needs the prompts' statistics so far; pass"
                " history=PromptStatistics()"
            )
        moments = history.update_moments(name, prompts, batch)
    baseline = (
        moments.mean
        if config.running or config.trim == 0
        else _compute_trimmed_mean(reward, group, batch.count, config.trim)
    )
    varied = (batch.count > 0) & (moments.std > NO_SPREAD)
    centred = np.where(varied[group], reward - baseline[group], 0.0)
    return centred / _compute_divisor(config, reward, moments)[group], varied


def _compute_moments(reward: np.ndarray, group: np.ndarray, groups: int) -> Moments:
    count = np.bincount(group, minlength=groups)
    mean = np.bincount(group, reward, groups) / np.maximum(count, 1)
    return Moments(count, mean, np.bincount(group, (reward - mean[group]) ** 2, groups))


def _compute_divisor(config: AdvantagesConfig, reward: np.ndarray, moments: Moments) -> np.ndarray:
    """std + 1e-4 of each group, or 1, [G]."""
    if config.std == "group":
        return moments.std + EPSILON
    if config.std == "global":
        return np.full_like(
            moments.mean, (reward.std(ddof=1) if len(reward) > 1 else 0.0) + EPSILON
        )
    return np.ones_like(moments.mean)


def _compute_trimmed_mean(
    reward: np.ndarray, group: np.ndarray, count: np.ndarray, trim: float
) -> np.ndarray:
    """Mean of each group without floor(trim * count) of its rewards at either end, [G]."""
    # .29 * 100 is 28.999999999999996; and the middle of a group always stays.
    cut = np.minimum(np.floor(trim * count + 1e-9), np.maximum(count - 1, 0) // 2)
    rank = _rank_in_group(reward, group)
    middle = (rank >= cut[group]) & (rank < (count - cut)[group])
    return _compute_moments(reward[middle], group[middle], len(count)).mean


def _is_extreme(advantage: np.ndarray, group: np.ndarray, most: int) -> np.ndarray:
    """Which samples are among the ``most`` best or worst of their group, [n]."""
    rank = _rank_in_group(advantage, group)
    return np.asarray((rank < most) | (rank >= np.bincount(group)[group] - most))


def _rank_in_group(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Rank of each value in its group, from 0 for the smallest; equal values by position, [n]."""
    order = np.lexsort((values, group))  # stable
    sorted_group = group[order]
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order)) - np.searchsorted(sorted_group, sorted_group)
    return rank


def _compute_metrics(
    total: np.ndarray, samples: int, informative: np.ndarray, kept: np.ndarray
) -> dict[str, float]:
    metrics = {
        "reward/scored_share": len(total) / samples,
        "group/size": len(total) / len(informative),
        "group/zero_std_share": float(1 - informative.mean()),
        "group/dropped_samples": float(samples - len(kept)),
    }
    if len(total):
        metrics |= {
            "reward/mean": float(total.mean()),
            "reward/min": float(total.min()),
            "reward/max": float(total.max()),
            "reward/std": float(total.std()),
        }
    if len(kept):
        metrics |= {
            "advantage/mean": float(kept.mean()),
            "advantage/std": float(kept.std()),
            "advantage/max_magnitude": float(np.abs(kept).max()),
        }
    return metrics
