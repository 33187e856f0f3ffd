r"""From rewards to advantages, on sample-level rewards R_k of K rewards with weights w_k:

    z(R) = (R - baseline) / (std + 1e-4)                inside the group of a prompt
    A    = z(sum_k w_k R_k)                             combine = "sum" (Flow-GRPO, 2505.05470)
    A    = sum_k w_k z(R_k)                             combine = "per_reward" (MixGRPO, 2507.21802)

baseline: the mean of the group; with ``trim`` the mean of what is left without floor(trim * count)
rewards at either end; with ``running`` the mean over all samples of the prompt so far. std
(unbiased): of the whole batch; of the group, with ``running`` of the prompt so far; or none, a
divisor of 1. All are over samples: over rewards repeated for each denoising step the std shrinks.

A reward that scores some prompt sets only has no part in the sums of the other prompts.

Of samples of several latents, each latent has its own A, over the rewards that judge it (OmniNFT,
2605.12480, "branch_aware"): A_video is of the rewards of pictures and of both, A_sound of those of
sound and of both.

For a tree (BranchGRPO, 2509.06040) the same is done for the nodes after each denoising step by
themselves, with

    R(node) = mean of R over its leaves
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ebbflow.recipe.choices import AdvantagesConfig
from ebbflow.recipe.rewards import MAX_SCORE

# Added to every divisor, as in Flow-GRPO's code: it bounds the advantages of a group that hardly
# varies.
EPSILON = 1e-4

NO_SPREAD = 1e-8
"""A spread below float noise is none: equal rewards must not become advantages."""


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages of N samples.

    Example:
        Two prompts with 3 samples each, rewards [.1, .5, .3] and [.4, .4, .4], std of the group:
        ``values`` = [-1., 1., 0., 0., 0., 0.] up to EPSILON and ``keep`` = [True, True, True,
        False, False, False], as the second group has no spread. ``metrics`` has
        group/zero_std_share = .5 and group/dropped_samples = 3.

    Attributes:
        values: float32 [N], clamped if asked; 0 where ``keep`` is False.
        keep: bool [N]; False for samples without a score, for groups that say nothing (fewer than
            two scores, or no spread), and for the middle of a group where only its extremes are
            trained on.
        metrics: statistics of rewards (their weighted sum), groups and advantages.
        of_steps: for a tree, the advantages of the W trained steps of each sample, float32 [N, W].
            The advantage of a node stands at its first sample; the other samples of the node, and
            steps that are not trained, have NaN. ``values`` are those of the leaves.
        of_latents: where rewards judge some latents only, the advantage of each of the K latents,
            float32 [N, K]. ``values`` are of all rewards.
        penalty_factor: float32 [N], of the reference penalty of each sample; None for 1.
    """

    values: np.ndarray
    keep: np.ndarray
    metrics: dict[str, float]
    of_steps: np.ndarray | None = None
    of_latents: np.ndarray | None = None
    penalty_factor: np.ndarray | None = None

    @property
    def row_advantages(self) -> np.ndarray:
        """What the rows of a loss have: [N], of a tree [N, W], of K latents [N, 1, K]."""
        if self.of_latents is not None:
            return self.of_latents[:, None]
        return self.values if self.of_steps is None else self.of_steps


@dataclass(frozen=True)
class Moments:
    """Count, mean and spread of the rewards of G groups.

    Example:
        Rewards [.1, .5, .3] of one group and [.4] of another: ``count`` = [3, 1], ``mean`` = [.3,
        .4], ``m2`` = [.08, 0.] and ``std`` = [.2, 0.].

    Attributes:
        count: integer [G].
        mean: float64 [G].
        m2: the sum of squared deviations from the mean, float64 [G].
    """

    count: np.ndarray
    mean: np.ndarray
    m2: np.ndarray

    @property
    def std(self) -> np.ndarray:
        """The unbiased standard deviation, [G]; 0 for a group of one."""
        return np.asarray(np.sqrt(self.m2 / np.maximum(self.count - 1, 1)))

    def merge_moments(self, other: Moments) -> Moments:
        """Return the moments of both sets of samples together (Chan, Golub and LeVeque 1979)."""
        # mean = mean_a + d n_b / n,   m2 = m2_a + m2_b + d^2 n_a n_b / n,   d = mean_b - mean_a.
        # Sums of squares would be shorter, and cancel where the mean is large against the spread.
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
        # Python's integers and floats from here on: JSON of the checkpoint knows no others.
        prompts = prompt_ids.tolist()
        count, mean, m2 = zip(*(seen.get(prompt, (0, 0.0, 0.0)) for prompt in prompts), strict=True)
        merged = Moments(np.array(count), np.array(mean), np.array(m2)).merge_moments(batch)
        rows = zip(merged.count.tolist(), merged.mean.tolist(), merged.m2.tolist(), strict=True)
        seen.update(zip(prompts, rows, strict=True))
        return merged

    def state_dict(self) -> dict[str, list[list[int | float]]]:
        """Return a list of [prompt id, count, mean, m2] for each reward; JSON holds it exactly."""
        return {
            reward: [[prompt, *moments] for prompt, moments in seen.items()]
            for reward, seen in self._seen.items()
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, list[list[int | float]]]) -> PromptStatistics:
        """Return the statistics that ``state_dict`` described."""
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
    """Compute group-relative advantages; a group is all samples of one prompt.

    Args:
        scores: float64 [N] of each reward; not finite where scoring failed, which masks the sample
            (it is not a score), as does a magnitude above ``MAX_SCORE``.
        weights: of the same rewards, positive.
        prompt_ids: integer [N].
        history: needed by ``config.running``, which adds this batch's scored samples to it: call
            once per batch.
        scored: bool [N], the samples that all rewards of their prompt have scored: a NaN there is
            of a reward that their prompt does not have. Default: all prompts have all rewards.

    Raises:
        ValueError: ``config.running`` without a history.
    """
    # From here on [n] is over the scored samples and [N] over all of them.
    scored, rewards, total = _select_scored_samples(scores, weights, scored)
    prompts, groups = np.unique(prompt_ids, return_inverse=True)
    group = groups[scored]

    # A = z(sum_k w_k R_k) is A = sum_k w_k z(R_k) with the sum as the only reward.
    if config.combine == "sum":
        rewards = {"sum": total}
        weights = {"sum": 1.0}

    # A group is trained on if any reward varies in it; one that does not vary adds 0.
    advantage = np.zeros(len(total))
    informative = np.zeros(len(prompts), bool)
    for name, reward in rewards.items():
        has_reward = np.isfinite(reward)  # of prompt sets that this reward scores
        normalised, varied = _normalise_rewards(
            name, reward[has_reward], group[has_reward], prompts, config, history
        )
        advantage[has_reward] += weights[name] * normalised
        informative |= varied
    chosen = np.flatnonzero(informative[group])

    # Before the clip: clipped advantages are ties, and position alone would choose among them.
    if config.keep_extremes is not None:
        chosen = chosen[_is_extreme(advantage[chosen], group[chosen], config.keep_extremes)]
    trained = advantage[chosen]
    if config.clip is not None:
        trained = trained.clip(-config.clip, config.clip)

    # Back to all N samples, float32 as training takes them.
    values = np.zeros(len(groups), np.float32)
    keep = np.zeros(len(groups), np.bool_)
    samples = np.flatnonzero(scored)[chosen]
    values[samples] = trained
    keep[samples] = True
    metrics = _compute_metrics(total, len(groups), informative, values[keep])
    return AdvantageResult(values, keep, metrics)


def compute_tree_advantages(
    scores: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    prompt_ids: np.ndarray,
    config: AdvantagesConfig,
    nodes: np.ndarray,
    scored: np.ndarray | None = None,
) -> AdvantageResult:
    """Compute advantages of every denoising step, among the nodes of a prompt after it.

    A node without other nodes of its prompt says nothing: what is before the first split is not
    trained.

    Args:
        scores, weights, prompt_ids, config, scored: as for ``compute_advantages``.
        nodes: integer [N, W]; samples of a prompt with the same number are in one node after a
            trained step.
    """
    scored, _, _ = _select_scored_samples(scores, weights, scored)
    of_steps = np.full(nodes.shape, np.nan, np.float32)
    for column, node in enumerate(nodes.T):
        # A node is a pair (prompt, number): the numbers repeat among prompts. Some versions of
        # numpy give the inverse as [1, N].
        _, first, index = np.unique(
            np.stack([prompt_ids, node]), axis=1, return_index=True, return_inverse=True
        )
        node_of_leaf = index.reshape(-1)[scored]

        # R(node) = mean of R over its leaves; then each node is a sample of its prompt.
        node_scores = {
            name: _mean_of_each_node(scores[name][scored], node_of_leaf, len(first))
            for name in weights
        }
        node_is_scored = np.bincount(node_of_leaf, minlength=len(first)) > 0
        result = compute_advantages(
            node_scores, weights, prompt_ids[first], config, scored=node_is_scored
        )
        of_steps[first[result.keep], column] = result.values[result.keep]

    # Values and metrics are those of the leaves, as of every other algorithm. A sample is kept if
    # it stands for a node at any step.
    leaves = compute_advantages(scores, weights, prompt_ids, config, scored=scored)
    keep = np.asarray(np.isfinite(of_steps).any(axis=1))
    return replace(leaves, keep=keep, of_steps=of_steps)


def compute_latent_advantages(
    scores: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    prompt_ids: np.ndarray,
    config: AdvantagesConfig,
    judges: Mapping[str, Collection[str]],
    scored: np.ndarray | None = None,
) -> AdvantageResult:
    """Compute the advantages of each latent over the rewards that judge it.

    A sample is trained if any of its latents is; a latent has 0 where its rewards say nothing.

    Args:
        scores, weights, prompt_ids, config, scored: as for ``compute_advantages``.
        judges: the names of the rewards of each latent, in the order of the latents; a latent
            without any has 0 throughout.
    """
    whole = compute_advantages(scores, weights, prompt_ids, config, scored=scored)
    # A sample that lacks a score of one latent is not trained at all, as elsewhere.
    usable, _, _ = _select_scored_samples(scores, weights, scored)
    columns = []
    keep = np.zeros(len(prompt_ids), np.bool_)
    metrics = dict(whole.metrics)
    for latent, names in judges.items():
        own = {name: scores[name] for name in weights if name in names}
        if not own:
            columns.append(np.zeros(len(prompt_ids), np.float32))
            continue
        # Prompt sets that no reward of this latent scores say nothing of it, nor of its spread.
        judged = usable & np.isfinite(np.stack(list(own.values()))).any(axis=0)
        own_weights = {name: weights[name] for name in own}
        result = compute_advantages(own, own_weights, prompt_ids, config, scored=judged)
        columns.append(result.values)
        keep |= result.keep
        metrics |= {f"{name}/{latent}": value for name, value in result.metrics.items()}
    metrics["group/dropped_samples"] = float(np.count_nonzero(~keep))
    return replace(whole, keep=keep, metrics=metrics, of_latents=np.stack(columns, 1))


def find_varied_prompts(
    scores: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    prompt_ids: np.ndarray,
    config: AdvantagesConfig,
    scored: np.ndarray | None = None,
) -> list[int]:
    """Find the prompts whose samples of this batch score differently, ascending.

    Args:
        scores, weights, prompt_ids, config, scored: as for ``compute_advantages``.
    """
    scored, rewards, total = _select_scored_samples(scores, weights, scored)
    prompts, groups = np.unique(prompt_ids, return_inverse=True)
    group = groups[scored]
    columns = [total] if config.combine == "sum" else list(rewards.values())
    is_varied = np.zeros(len(prompts), bool)
    for column in columns:
        has_reward = np.isfinite(column)
        moments = _compute_moments(column[has_reward], group[has_reward], len(prompts))
        is_varied |= moments.std > NO_SPREAD
    varied: list[int] = prompts[is_varied].tolist()
    return varied


def compute_reward_moments(
    reward: np.ndarray, prompt_ids: np.ndarray
) -> tuple[np.ndarray, Moments]:
    """Return (the prompts with a scored sample, integer [G] ascending, moments of their rewards).

    Args:
        reward: float64 [N]; NaN where scoring failed.
        prompt_ids: integer [N].
    """
    scored = np.abs(reward) <= MAX_SCORE  # False for NaN
    prompts, group = np.unique(prompt_ids[scored], return_inverse=True)
    return prompts, _compute_moments(reward[scored], group, len(prompts))


def _select_scored_samples(
    scores: Mapping[str, np.ndarray], weights: Mapping[str, float], has_all: np.ndarray | None
) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
    """Return (which samples have all scores [N], those scores of each reward [n], their weighted
    sum [n]).

    Args:
        has_all: as ``scored`` of ``compute_advantages``; the scores then are NaN where a sample
            does not have that reward.
    """
    columns = np.stack([scores[name] for name in weights])  # [K, N]
    # A failed score is not finite and fails this comparison. A score is never taken for a 0: it
    # would pull the baseline of its group down.
    usable = np.abs(columns) <= MAX_SCORE
    if has_all is None:
        scored = usable.all(axis=0)
    else:
        scored = has_all & (usable | np.isnan(columns)).all(axis=0)
    rewards = {name: scores[name][scored] for name in weights}
    # A reward that the prompt does not have has no part in the sum.
    parts = [
        np.where(np.isnan(rewards[name]), 0.0, weight * rewards[name])
        for name, weight in weights.items()
    ]
    return scored, rewards, np.sum(parts, axis=0)


def _mean_of_each_node(values: np.ndarray, node: np.ndarray, nodes: int) -> np.ndarray:
    """Compute the mean of the values of each node, [nodes]; NaN for a node without any."""
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
    """Return (z of each scored sample [n], which groups have scores and a spread [G]); z is 0 in a
    group without a spread.
    """
    # With ``running`` baseline and divisor are over all samples of a prompt so far, so that even a
    # batch with one sample of a prompt says something.
    batch = moments = _compute_moments(reward, group, len(prompts))
    if config.running:
        if history is None:
            raise ValueError(
                "advantages.running = true needs the prompts' statistics so far; pass"
                " history=PromptStatistics()"
            )
        moments = history.update_moments(name, prompts, batch)
    if config.running or config.trim == 0:
        baseline = moments.mean
    else:
        baseline = _compute_trimmed_mean(reward, group, batch.count, config.trim)

    # z = (R - baseline) / (std + 1e-4). In a group without a spread R - baseline is rounding, which
    # the division by 1e-4 would turn into advantages.
    varied = (batch.count > 0) & (moments.std > NO_SPREAD)
    centred = np.where(varied[group], reward - baseline[group], 0.0)
    if config.std == "group":
        divisor = moments.std + EPSILON
    elif config.std == "global":
        # Of the batch's raw rewards, not of their deviations: hard and easy prompts widen it.
        spread = reward.std(ddof=1) if len(reward) > 1 else 0.0
        divisor = np.full_like(moments.mean, spread + EPSILON)
    else:
        # Dr. GRPO (2503.20783) divides by nothing: a std makes groups that hardly vary weigh more.
        divisor = np.ones_like(moments.mean)
    return centred / divisor[group], varied


def _compute_moments(reward: np.ndarray, group: np.ndarray, groups: int) -> Moments:
    """Compute the moments of each of ``groups`` groups; ``group`` is that of each reward, [n]."""
    # Deviations from the mean in a second pass: E[R^2] - mean^2 would cancel.
    count = np.bincount(group, minlength=groups)
    mean = np.bincount(group, reward, groups) / np.maximum(count, 1)
    return Moments(count, mean, np.bincount(group, (reward - mean[group]) ** 2, groups))


def _compute_trimmed_mean(
    reward: np.ndarray, group: np.ndarray, count: np.ndarray, trim: float
) -> np.ndarray:
    """Compute the mean of each group without floor(trim * count) of its rewards at either end,
    [G].
    """
    # 1e-9, because .29 * 100 is 28.999999999999996. The minimum, because the middle of a group
    # always stays.
    cut = np.minimum(np.floor(trim * count + 1e-9), np.maximum(count - 1, 0) // 2)
    rank = _rank_in_group(reward, group)
    middle = (rank >= cut[group]) & (rank < (count - cut)[group])
    return _compute_moments(reward[middle], group[middle], len(count)).mean


def _is_extreme(advantage: np.ndarray, group: np.ndarray, most: int) -> np.ndarray:
    """Return which samples are among the ``most`` best or the ``most`` worst of their group, bool
    [n].
    """
    rank = _rank_in_group(advantage, group)
    return np.asarray((rank < most) | (rank >= np.bincount(group)[group] - most))


def _rank_in_group(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return the rank of each value in its group, from 0 for the smallest; equal values by
    position, integer [n].
    """
    # By group, then by value. lexsort is stable: ties have the same order on every machine.
    order = np.lexsort((values, group))
    sorted_group = group[order]
    rank = np.empty(len(order), np.int64)
    # Position in the order less the position at which the group begins.
    rank[order] = np.arange(len(order)) - np.searchsorted(sorted_group, sorted_group)
    return rank


def _compute_metrics(
    total: np.ndarray, samples: int, informative: np.ndarray, trained: np.ndarray
) -> dict[str, float]:
    """Summarise the weighted sums of the scored samples, the groups, and the trained advantages."""
    metrics = {
        "reward/scored_share": len(total) / samples,
        "group/size": len(total) / len(informative),
        "group/zero_std_share": float(1 - informative.mean()),
        "group/dropped_samples": float(samples - len(trained)),
    }
    # The mean of nothing would be NaN.
    if len(total):
        metrics |= {
            "reward/mean": float(total.mean()),
            "reward/min": float(total.min()),
            "reward/max": float(total.max()),
            "reward/std": float(total.std()),
        }
    return metrics | summarise_advantages(trained)


def summarise_advantages(trained: np.ndarray) -> dict[str, float]:
    """Summarise the advantages that are trained on; no metrics without any."""
    if not len(trained):
        return {}
    return {
        "advantage/mean": float(trained.mean()),
        "advantage/std": float(trained.std()),
        "advantage/max_magnitude": float(np.abs(trained).max()),
    }
