"""Scores by the kinds of prompts of a benchmark, and their mean as GenEval publishes it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ebbflow.data.prompts import Prompt
from ebbflow.data.records import CategoryMeans
from ebbflow.evaluation.categories import (
    MAX_CATEGORIES,
    average_over_categories,
    compute_category_means,
)

TAGS = ["single_object", "two_object", "counting", "colors", "position", "color_attr"]


def prompt(number: int, **metadata: object) -> Prompt:
    return Prompt(
        number, f"prompt {number}", "", None, "benchmark.jsonl", "held_out", json.dumps(metadata)
    )


def found(prompts: list[Prompt], **columns: list[float]) -> dict[tuple[str, str], CategoryMeans]:
    categories = compute_category_means(
        prompts, {name: np.array(values, np.float64) for name, values in columns.items()}
    )
    return {(category.column, category.value): category for category in categories}


def test_genevals_overall_score_counts_every_tag_the_same() -> None:
    sizes = dict(zip(TAGS, (80, 99, 80, 94, 100, 100), strict=True))  # of the published file
    right = dict(zip(TAGS, (80, 66, 40, 47, 10, 25), strict=True))
    prompts = [
        prompt(number, tag=tag)
        for number, tag in enumerate(tag for tag in TAGS for _ in range(sizes[tag]))
    ]
    scores = [float(index < right[tag]) for tag in TAGS for index in range(sizes[tag])]
    categories = found(prompts, geneval=scores)
    assert [value for _, value in categories] == TAGS
    assert {
        value: (category.prompts, category.means["geneval"])
        for (_, value), category in categories.items()
    } == {tag: (sizes[tag], pytest.approx(right[tag] / sizes[tag])) for tag in TAGS}
    overall = average_over_categories(list(categories.values()))["geneval"]
    assert overall == pytest.approx((1 + 2 / 3 + 1 / 2 + 1 / 2 + 1 / 10 + 1 / 4) / 6)
    assert overall != pytest.approx(np.mean(scores), abs=0.01)


def test_a_prompt_counts_once_however_many_samples_it_has_and_failures_do_not() -> None:
    one = prompt(1, tag="a")
    two = prompt(2, tag="a")
    other = prompt(3, tag="b")
    categories = found(
        [one, two, other, one], score=[1.0, 0.0, 0.5, 0.5], broken=[np.nan, 3.0, np.nan, np.nan]
    )
    assert categories["tag", "a"].means == {"score": 0.375, "broken": 3.0}
    assert categories["tag", "a"].prompts == 2
    assert categories["tag", "b"].means == {"score": 0.5}
    assert average_over_categories(list(categories.values())) == {"score": pytest.approx(0.4375)}
    assert average_over_categories([]) == {}


def test_a_prompt_of_vbench_is_in_all_its_dimensions_and_every_column_has_categories() -> None:
    prompts = [
        prompt(1, dimension=["overall_consistency", "imaging_quality"], Category="Arts"),
        prompt(2, dimension=["imaging_quality"], Category="Animals"),
        prompt(3, atom_count=3, Note="x"),
        prompt(4, atom_count=4, Note="y", Category=""),
    ]
    categories = found(prompts, score=[1.0, 2.0, 3.0, 4.0])
    assert {key: category.means["score"] for key, category in categories.items()} == {
        ("dimension", "overall_consistency"): 1,
        ("dimension", "imaging_quality"): 1.5,
        ("Category", "Arts"): 1,
        ("Category", "Animals"): 2,
        ("atom_count", "3"): 3,
        ("atom_count", "4"): 4,
    }


def test_what_names_all_prompts_alike_or_each_by_itself_makes_no_categories() -> None:
    alike = [prompt(number, tag="same") for number in range(3)]
    assert found(alike, score=[1.0, 2.0, 3.0]) == {}
    many = [prompt(number, tag=f"tag {number}") for number in range(MAX_CATEGORIES + 1)]
    assert found(many, score=[1.0] * len(many)) == {}
    assert len(found(many[:-1], score=[1.0] * MAX_CATEGORIES)) == MAX_CATEGORIES
    assert found([prompt(1), prompt(2, tag=None)], score=[1.0, 2.0]) == {}
