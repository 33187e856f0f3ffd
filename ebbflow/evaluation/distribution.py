"""How the scores of a policy spread: what a mean hides when a reward is gamed on some prompts."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from ebbflow.data.records import Distribution

TENTH = 0.1


def mean_over_prompts(prompt_ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The mean of the finite values of each prompt, float64 [P]; a prompt without any is left out."""
    return np.asarray(_by_prompt(prompt_ids, values).mean(), np.float64)


def distribution(prompt_ids: np.ndarray, values: np.ndarray) -> Distribution | None:
    """Spread, worst tenth and best of several samples of a metric; None where nothing is finite.

    Args:
        prompt_ids: [N], of the samples.
        values: float64 [N], NaN where the metric failed.
    """
    by_prompt = _by_prompt(prompt_ids, values)
    means = np.sort(by_prompt.mean().to_numpy())
    if not len(means):
        return None
    repeated = by_prompt.max()[by_prompt.size() > 1]
    return Distribution(
        spread=float(means.std()),
        worst_tenth=float(means[: math.ceil(TENTH * len(means))].mean()),
        best_of=float(repeated.mean()) if len(repeated) else None,
    )


def _by_prompt(prompt_ids: np.ndarray, values: np.ndarray) -> pd.api.typing.SeriesGroupBy:
    finite = np.isfinite(values)
    return pd.Series(np.asarray(values, np.float64)[finite]).groupby(np.asarray(prompt_ids)[finite])
