"""How the scores of a policy spread: what a mean hides when a reward is gamed on some prompts."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from ebbflow.data.records import Distribution

TENTH = 0.1


def average_per_prompt(prompt_ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Average the finite values of each prompt, float64 [P]; a prompt without any is left out."""
    return np.asarray(_group_by_prompt(prompt_ids, values).mean(), np.float64)


def summarize_distribution(prompt_ids: np.ndarray, values: np.ndarray) -> Distribution | None:
    """Summarize spread, worst tenth and best of several samples of a metric; None where nothing is
    finite.

    Args:
        prompt_ids: [N], of the samples.
        values: float64 [N], NaN where the metric failed.
    """
    by_prompt = _group_by_prompt(prompt_ids, values)
    means = np.sort(by_prompt.mean().to_numpy())
    if not len(means):
        return None
    # The best of one sample is that sample: such prompts would pull ``best_of`` to the mean.
    repeated = by_prompt.max()[by_prompt.size() > 1]
    return Distribution(
        spread=float(means.std()),
        # Of the prompts, rounded up, so that even a few prompts have a worst one.
        worst_tenth=float(means[: math.ceil(TENTH * len(means))].mean()),
        best_of=float(repeated.mean()) if len(repeated) else None,
    )


def estimate_best_of(
    prompt_ids: np.ndarray, values: np.ndarray, k: int, samples: int
) -> float | None:
    """Estimate the expected best of ``k`` samples of a prompt: the mean over all choices of k, then
    over the prompts with ``samples`` or more.

    The largest of k out of n sorted values is the i-th with probability C(i - 1, k - 1) / C(n, k),
    as in the estimator of pass@k (Chen et al., 2107.03374).

    Args:
        prompt_ids: [N], of the samples.
        values: float64 [N], NaN where the metric failed.
        samples: at least ``k``; prompts with fewer finite values are left out. None where no prompt
            has so many.
    """
    best_of_prompts = []
    for _, group in _group_by_prompt(prompt_ids, values):
        ordered = np.sort(group.to_numpy())
        count = len(ordered)
        if count >= samples:
            # C(i - 1, k - 1) / C(n, k): the other k - 1 are among the i - 1 smaller ones.
            chances = [math.comb(rank, k - 1) / math.comb(count, k) for rank in range(count)]
            best_of_prompts.append(float(np.dot(chances, ordered)))
    return float(np.mean(best_of_prompts)) if best_of_prompts else None


def _group_by_prompt(prompt_ids: np.ndarray, values: np.ndarray) -> pd.api.typing.SeriesGroupBy:
    # A failure is no score: it is left out, and coverage counts it.
    finite = np.isfinite(values)
    return pd.Series(np.asarray(values, np.float64)[finite]).groupby(np.asarray(prompt_ids)[finite])
