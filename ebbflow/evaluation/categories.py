"""Mean scores of the kinds of prompts that a benchmark's file tells apart: GenEval's tags, VBench's
dimensions, categories.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ebbflow.data.prompts import Prompt
from ebbflow.data.records import CategoryMeans
from ebbflow.evaluation.distribution import average_per_prompt

CATEGORY_COLUMNS = ("tag", "atom_count", "Category", "Challenge", "dimension", "category")
"""Columns of a prompt file that tell kinds apart: of GenEval, GenEval 2, PartiPrompts (two),
VBench, and one of your own.
"""
MAX_CATEGORIES = 64
"""Most categories of a column; one with more values names prompts instead of kinds."""


def compute_category_means(
    prompts: Sequence[Prompt], columns: Mapping[str, np.ndarray]
) -> list[CategoryMeans]:
    """Compute the means of every metric over the prompts of each category, in the order in which
    the categories come up.

    A prompt is in several categories of a column where its value is a list. A column with one
    value, or more than ``MAX_CATEGORIES``, has none.

    Args:
        prompts: [N], of the samples.
        columns: of each metric float64 [N], NaN where it failed.
    """
    ids = np.array([prompt.prompt_id for prompt in prompts])
    members: dict[str, dict[str, set[int]]] = {
        column: defaultdict(set) for column in CATEGORY_COLUMNS
    }
    for prompt in prompts:
        for column, value in _list_category_values(prompt):
            members[column][value].add(prompt.prompt_id)
    results = []
    for column, categories in members.items():
        # One category is the whole table, whose means are elsewhere.
        if not 1 < len(categories) <= MAX_CATEGORIES:
            continue
        for value, category in categories.items():
            rows = np.isin(ids, list(category))
            means = {}
            for name, values in columns.items():
                # A prompt with several samples counts once.
                prompt_means = average_per_prompt(ids[rows], values[rows])
                if len(prompt_means):
                    means[name] = float(prompt_means.mean())
            results.append(
                CategoryMeans(column=column, value=value, prompts=len(category), means=means)
            )
    return results


def average_over_categories(categories: Sequence[CategoryMeans]) -> dict[str, float]:
    """Average over the categories of one column, each of which counts the same: GenEval's overall
    score.

    A metric that one category lacks is left out.
    """
    averages: dict[str, float] = {}
    if not categories:
        return averages
    for name in categories[0].means:
        means = [category.means[name] for category in categories if name in category.means]
        # The mean over fewer categories would be of another benchmark.
        if len(means) == len(categories):
            averages[name] = float(np.mean(means))
    return averages


def _list_category_values(prompt: Prompt) -> Iterator[tuple[str, str]]:
    """Iterate over the columns of a prompt and its values that make categories."""
    metadata = json.loads(prompt.metadata)
    for column in CATEGORY_COLUMNS:
        value = metadata.get(column)
        values = value if isinstance(value, list) else [value]  # VBench's dimensions are a list
        for one in values:
            if isinstance(one, (str, int)) and one != "":
                yield column, str(one)
