"""The closed forms of advantages and rollout correction, the continuation of ``conformance_forms``:
rewards and log-prob differences in, weights and masks out, no gradients.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np

Values = dict[str, Any]


def group_advantages(c: Any) -> Values:
    """A = (R - mean of the prompt's group) / (std + 1e-4), clamped to +-clip; std is unbiased (n -
    1)

    std: of the whole batch (global), of the group (group), or none: a divisor of 1. Several rewards
    [K, N]: A of the weighted sum (sum), or the sum of the weighted A of each (per_reward). trim:
    the baseline leaves out floor(trim n) rewards at either end. With earlier rewards the baseline
    and the std of the group are over the prompt's samples of both. keep_extremes: this many of the
    best and of the worst A of a group. A null reward masks its sample. keep: has a score, in a
    group with a spread, and is not left out; A is 0 elsewhere.
    """
    # Written with loops over prompts and samples, not vectorised like the code under test: two
    # ways of writing it do not share a mistake.
    scored = [
        sample for sample in range(len(c.prompt_ids)) if np.isfinite(c.rewards[:, sample]).all()
    ]
    columns = c.rewards
    past = c.earlier_rewards
    shares = c.weights
    if c.combine == "sum":
        columns = [c.weights @ columns]
        past = [c.weights @ past]
        shares = [1.0]
    values = np.zeros(len(c.prompt_ids))
    keep = np.zeros(len(c.prompt_ids), bool)
    for prompt in set(c.prompt_ids.tolist()):
        # indices of the prompt's samples that have a score
        group = [sample for sample in scored if c.prompt_ids[sample] == prompt]
        for column, earlier, share in zip(columns, past, shares, strict=True):
            seen = sorted([*column[group], *earlier[c.earlier_prompt_ids == prompt]])
            spread = statistics.stdev(seen)
            cut = math.floor(c.trim * len(seen))
            divisor = {
                "global": statistics.stdev(column[scored]) + 1e-4,
                "group": spread + 1e-4,
                "none": 1.0,
            }[c.std]
            # all alike: nothing to learn from, and A would be 0 / 1e-4
            if spread == 0:
                continue
            baseline = statistics.fmean(seen[cut : len(seen) - cut])
            for sample in group:
                values[sample] += share * (column[sample] - baseline) / divisor
                keep[sample] = True
        if c.keep_extremes:
            ranked = sorted(group, key=lambda sample: values[sample])
            for sample in ranked[c.keep_extremes : len(ranked) - c.keep_extremes]:
                values[sample] = 0.0
                keep[sample] = False
    return {"advantages": np.clip(values, -c.clip, c.clip), "keep": keep}


def rollout_correction(c: Any) -> Values:
    """x = delta (mean) or D delta (sum); w = exp(x) of the step, or exp(sum x) of the trajectory;
    delta = log_prob - rollout's

    truncated: min(w, high); masked: w in [low, high], the row dropped elsewhere. Rejection drops
    rows whose k1 = |x|, k2 = x^2 / 2 or k3 = exp(x) - 1 - x (of the step, or the mean, sum or max
    over the sequence) is above the threshold. Dropped rows have weight 0. normalise: divided by the
    mean over the kept rows.
    """
    # delta [samples, steps]; each row is the sequence of one trajectory
    weights = np.ones(c.delta.shape)
    keep = np.ones(c.delta.shape, bool)
    over: Any = {
        "sequence_mean": statistics.fmean,
        "sequence_sum": math.fsum,
        "sequence_max": max,
    }.get(c.reject_level)
    for sample, row in enumerate(c.delta * (c.dims if c.unit == "sum" else 1)):
        distances = [
            {"none": 0.0, "k1": abs(x), "k2": x * x / 2, "k3": math.expm1(x) - x}[c.reject]
            for x in row
        ]
        for step, x in enumerate(row):
            ratio = math.exp(math.fsum(row) if c.level == "trajectory" else x)
            near = (over(distances) if over else distances[step]) <= c.reject_above
            keep[sample, step] = near and (c.weights != "masked" or c.low <= ratio <= c.high)
            weights[sample, step] = {"none": 1.0, "truncated": min(ratio, c.high), "masked": ratio}[
                c.weights
            ]
    weights *= keep
    return {"weights": weights / (weights[keep].mean() if c.normalise else 1), "keep": keep}


def rollout_divergence(c: Any) -> Values:
    """k3 = mean(exp(delta) - 1 - delta), chi2 = mean(exp(2 delta)) - 1, chi2_sum = mean(exp(2 D
    delta)) - 1
    """
    delta = c.delta.flatten().tolist()
    # expm1: exp(x) - 1 cancels for deltas of 1e-2
    divergences = {
        "k3": lambda x: math.expm1(x) - x,
        "chi2": lambda x: math.expm1(2 * x),
        "chi2_sum": lambda x: math.expm1(2 * c.dims * x),
    }
    return {name: statistics.fmean(map(value, delta)) for name, value in divergences.items()}
