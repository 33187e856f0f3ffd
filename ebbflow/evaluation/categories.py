"""Scores of the kinds of prompts that a benchmark's file tells apart: GenEval's tags, VBench's
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
"""Of a column; one with more values names prompts instead of kinds."""


def compute_category_means(
    prompts: Sequence[Prompt], columns: Mapping[str, np.ndarray]
) -> list[CategoryMeans]:
    """The means of every metric over the prompts of each category, in the order in which the
    categories come up.

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
    found = []
    for column, categories in members.items():
        for value, category in categories.items() if 1 < len(categories) <= MAX_CATEGORIES else ():
            rows = np.isin(ids, list(category))
            means = {
                name: average_per_prompt(ids[rows], values[rows])
                for name, values in columns.items()
            }
            finite = {
                name: float(of_prompts.mean())
                for name, of_prompts in means.items()
                if len(of_prompts)
            }
            found.append(
                CategoryMeans(column=column, value=value, prompts=len(category), means=finite)
            )
    return found


def average_over_categories(categories: Sequence[CategoryMeans]) -> dict[str, float]:
    """The mean over categories of one column, each of which counts the same: GenEval's overall
    score.

    What one lacks is left out.
    """
    names = (
        [
            name
            for name in categories[0].means
            if all(name in category.means for category in categories)
        ]
        if categories
        else []
    )
    return {
        name: float(np.mean([category.means[name] for category in categories])) for name in names
    }


def _list_category_values(prompt: Prompt) -> Iterator[tuple[str, str]]:
    """The columns and values of a prompt that make categories."""
    metadata = json.loads(prompt.metadata)
    for column in CATEGORY_COLUMNS:
        value = metadata.get(column)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, (str, int)) and one != "":
                yield column, str(one)
