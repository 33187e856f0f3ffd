"""What an evaluation says about the scores of its held-out samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ebbflow.data.prompts import Prompt
from ebbflow.evaluation.categories import compute_category_means
from ebbflow.evaluation.distribution import average_per_prompt, summarize_distribution


def summarize_held_out(
    prompts: Sequence[Prompt], columns: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Summarize the scores of N held-out samples: the fields ``held_out``, ``coverage``,
    ``distributions`` and ``categories`` of an ``Evaluation``.

    Args:
        prompts: [N], of the samples.
        columns: ``reward`` and every metric, float64 [N], NaN where it failed.
    """
    ids = np.array([prompt.prompt_id for prompt in prompts])
    means = {}
    distributions = {}
    for name, values in columns.items():
        # A prompt counts once, however many samples it has.
        prompt_means = average_per_prompt(ids, values)
        if len(prompt_means):
            means[name] = float(prompt_means.mean())
        distribution = summarize_distribution(ids, values)
        if distribution is not None:
            distributions[name] = distribution
    return {
        "held_out": means,
        "coverage": float(np.isfinite(columns["reward"]).mean()),
        "distributions": distributions,
        "categories": compute_category_means(prompts, columns),
    }
