"""The means by category of the prompts, for prompt files that have such columns."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ebbflow.data.records import CategoryMeans, Evaluation
from ebbflow.evaluation.categories import average_over_categories


class CategoryRow(NamedTuple):
    """A line of the table of a column: a category, or the mean over all of them.

    Attributes:
        prompts: None in the line of the mean.
        was, now: means by metric; ``was`` is empty where the other side saw no such prompts.
    """

    name: str
    prompts: int | None
    was: dict[str, float]
    now: dict[str, float]


def summarise_categories(before: Evaluation, after: Evaluation) -> dict[str, Any]:
    """Summarise, by column of the prompt file and policy, the means of each category and, as
    ``overall``, the mean over the categories.
    """
    return {
        column: {
            when: {
                "overall": average_over_categories(categories),
                "values": {
                    category.value: {"prompts": category.prompts, **keep_finite(category.means)}
                    for category in categories
                },
            }
            for when, categories in sides.items()
        }
        for column, sides in _group_categories(before, after).items()
    }


def _group_categories(
    before: Evaluation, after: Evaluation
) -> dict[str, dict[str, list[CategoryMeans]]]:
    """Group the categories of two evaluations by column, as ``before`` and ``after``."""
    # A dictionary keeps the order of the columns in the prompt file; a set would not.
    columns = dict.fromkeys(category.column for category in after.categories)
    sides = {"before": before, "after": after}
    return {
        column: {
            when: [category for category in evaluation.categories if category.column == column]
            for when, evaluation in sides.items()
        }
        for column in columns
    }


def build_category_tables(before: Evaluation, after: Evaluation) -> dict[str, list[CategoryRow]]:
    """Build a table per column: its categories and their mean, before and after."""
    tables = {}
    for column, sides in _group_categories(before, after).items():
        means_before = {category.value: category.means for category in sides["before"]}
        # Of the categories that ``after`` has: one that the other side lacks keeps its line, with
        # no mean there.
        rows = [
            CategoryRow(
                category.value,
                category.prompts,
                means_before.get(category.value, {}),
                category.means,
            )
            for category in sides["after"]
        ]
        # The mean over categories, not over prompts: a rare category counts as much as a common.
        overall = [average_over_categories(sides[when]) for when in ("before", "after")]
        tables[column] = [*rows, CategoryRow("mean of these", None, *overall)]
    return tables


def keep_finite(values: dict[str, float]) -> dict[str, float]:
    """Return the values without NaN, which JSON lacks: a metric that was not measured is absent."""
    return {key: value for key, value in values.items() if math.isfinite(value)}
