"""The paired interval and the bootstrap against what is known in closed form, and the join that
feeds them.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.data.schema import build_evaluation_schema
from ebbflow.evaluation import statistics
from ebbflow.evaluation.mean_test import compute_p_values
from ebbflow.evaluation.statistics import (
    compare_metric,
    compute_disaster_p_values,
    compute_fall_p_values,
    compute_paired_interval,
    compute_paired_tail,
    reject_by_holm,
)


def table(values: dict[tuple[int, int], float | None], split: str = "held_out") -> pa.Table:
    rows = [
        {
            "prompt_id": prompt,
            "sample": sample,
            "split": split,
            "prompt": "p",
            "target": "T",
            "image": b"",
            "reward": value,
        }
        for (prompt, sample), value in values.items()
    ]
    return pa.Table.from_pylist(rows, schema=build_evaluation_schema(["reward"]))


def test_the_interval_covers_the_true_mean_at_least_as_often_as_it_says() -> None:
    runs = 2000
    differences = np.random.default_rng(0).normal(0.3, 1.0, (runs, 40)) - 0.3
    # The interval has the true mean inside where neither of the tests at its ends rejects it.
    above, below = (
        compute_p_values(values, values.min(axis=1)) for values in (differences, -differences)
    )
    covered = (np.minimum(above, below) >= 0.05).mean()
    assert covered > 0.9 - 3 * np.sqrt(0.9 * 0.1 / runs)


def test_the_interval_is_about_the_normal_one_for_many_prompts() -> None:
    difference = np.random.default_rng(1).normal(0.1, 0.5, 2000)
    mean, low, high = compute_paired_interval(difference, np.zeros(2000), 0.95)
    half = 1.96 * difference.std(ddof=1) / np.sqrt(2000)
    assert mean == pytest.approx(difference.mean())
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.1 * half)


def test_pairing_removes_the_spread_between_prompts() -> None:
    easy_and_hard = np.random.default_rng(2).uniform(0, 1, 100)
    interval = compute_paired_interval(easy_and_hard + 0.01, easy_and_hard, 0.95)
    assert interval == pytest.approx((0.01, 0.01, 0.01))


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=30))
@settings(max_examples=10, deadline=None)
def test_the_interval_is_antisymmetric_and_contains_the_mean(values: list[float]) -> None:
    candidate = np.array(values)
    champion = np.zeros(len(values))
    difference, low, high = compute_paired_interval(candidate, champion, 0.95)
    assert compute_paired_interval(champion, candidate, 0.95) == pytest.approx(
        (-difference, -high, -low)
    )
    assert low - 1e-12 <= difference <= high + 1e-12


@pytest.mark.parametrize(
    ("lowest", "worst"), [(0.0, -0.5), (0.3, -0.2), (None, -0.5), (-3.0, -3.5)]
)
def test_an_unseen_prompt_falls_as_far_as_scores_can(lowest: float | None, worst: float) -> None:
    candidate = np.array([0.8, 0.6, 0.9])
    champion = np.array([0.5, 0.6, 0.4])  # mean .5; seen are scores from .4 to .9
    p_value = compute_disaster_p_values(candidate, champion, lowest)
    assert p_value == pytest.approx(compute_p_values(candidate - champion, worst))


def test_a_fall_is_ruled_out_by_proof_and_not_by_the_mean() -> None:
    champion = np.random.default_rng(5).normal(size=(2, 64))
    noise = np.random.default_rng(6).normal(size=64)
    noise = (noise - noise.mean()) / noise.std()
    # Both fell by .1 on average, and .2 is allowed: of the first nobody can say that it did.
    candidate = champion - 0.1 + np.stack([2 * noise, 0.1 * noise])
    p_values = compute_fall_p_values(candidate, champion, np.array([0.2, 0.2]))
    assert p_values[0] > 0.1
    assert p_values[1] < 1e-6


def test_where_no_prompt_fell_no_tolerance_is_needed() -> None:
    champion = np.ones(20)
    assert compute_fall_p_values(champion, champion, np.array(0.0)) == 0
    fallen = champion - np.eye(1, 20)[0] * 0.01
    assert compute_fall_p_values(fallen, champion, np.array(0.0)) == 1


@pytest.mark.parametrize(
    ("candidate", "champion", "message"),
    [
        ([1.0], [0.0], "at least 2 prompts"),
        ([1.0, np.nan], [0.0, 0.0], "1 of 2 pairs are not finite"),
        ([1.0, 2.0], [0.0], "equally long"),
    ],
)
def test_what_cannot_be_paired_is_an_error(
    candidate: list[float], champion: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compute_paired_interval(np.array(candidate), np.array(champion), 0.95)


def test_compare_joins_on_prompt_and_sample_whatever_the_order() -> None:
    candidate = table({(2, 0): 0.9, (1, 0): 0.7, (3, 0): 0.8})
    champion = table({(1, 0): 0.5, (3, 0): 0.5, (2, 0): 0.5})
    result = compare_metric("reward", candidate, champion)
    assert result.difference == pytest.approx(0.3)
    assert (result.candidate, result.champion, result.prompts) == (
        pytest.approx(0.8),
        pytest.approx(0.5),
        3,
    )
    assert result.low <= 0.3 <= result.high


def test_compare_averages_the_samples_of_a_prompt_first() -> None:
    candidate = table({(1, 0): 1.0, (1, 1): 0.0, (2, 0): 1.0})
    champion = table({(1, 0): 0.0, (1, 1): 0.0, (2, 0): 0.0})
    assert compare_metric("reward", candidate, champion).difference == pytest.approx(0.75)


def test_compare_leaves_out_pairs_that_one_side_has_not_scored() -> None:
    candidate = table({(1, 0): 0.9, (2, 0): None, (3, 0): 0.7, (4, 0): float("nan"), (6, 0): 0.0})
    champion = table({(1, 0): 0.5, (2, 0): 0.5, (3, 0): 0.5, (4, 0): 0.5, (5, 0): 0.0})
    result = compare_metric("reward", candidate, champion)
    assert (result.prompts, result.difference) == (2, pytest.approx(0.3))


def test_compare_looks_at_the_held_out_split_alone() -> None:
    held_out = {(1, 0): 0.5, (2, 0): 0.5}
    candidate = pa.concat_tables([table(held_out), table({(9, 0): 1.0}, split="validation")])
    champion = pa.concat_tables([table(held_out), table({(9, 0): 0.0}, split="validation")])
    assert compare_metric("reward", candidate, champion).difference == 0


def test_compare_names_what_is_wrong_with_a_table() -> None:
    two = {(1, 0): 0.5, (2, 0): 0.5}
    with pytest.raises(ValueError, match="no column 'ocr'.*reward"):
        compare_metric("ocr", table(two), table(two))
    with pytest.raises(ValueError, match=r"= \[1, 0\] occurs more than once"):
        compare_metric("reward", pa.concat_tables([table(two), table(two)]), table(two))
    with pytest.raises(ValueError, match="scored only 0 of 3 held-out prompts"):
        compare_metric("reward", table(two), table({(3, 0): 0.5}))


def test_memory_is_bounded_without_changing_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(3).normal(0.2, 1, size=50)
    whole = compute_paired_tail(values, 1000, 7)
    monkeypatch.setattr(statistics, "DRAWS_PER_CHUNK", 50 * 64)
    assert 0 < compute_paired_tail(values, 1000, 7) == whole


def test_the_test_is_as_often_wrong_as_it_says() -> None:
    generator = np.random.default_rng(4)
    p_values = [compute_paired_tail(generator.normal(0, 1, 60), 400, seed) for seed in range(400)]
    assert abs(np.mean(np.array(p_values) <= 0.1) - 0.1) < 3 * np.sqrt(0.1 * 0.9 / 400) + 0.01


@pytest.mark.parametrize("differences", [[1.0], [1.0, np.nan]])
def test_what_cannot_be_tested_is_an_error(differences: list[float]) -> None:
    with pytest.raises(ValueError, match="at least 2 finite differences"):
        compute_paired_tail(np.array(differences), 100, 0)


@pytest.mark.parametrize(
    ("p_values", "rejected"),
    [
        ({"a": 0.01, "b": 0.02, "c": 0.04}, "abc"),  # .05/3, .05/2, .05
        ({"a": 0.01, "b": 0.03, "c": 0.04}, "a"),
        ({"a": 0.02, "b": 0.02, "c": 0.02}, ""),
        ({"a": 0.05}, "a"),
        ({}, ""),
    ],
)
def test_holm_steps_down_until_one_is_too_large(p_values: dict[str, float], rejected: str) -> None:
    assert reject_by_holm(p_values, 0.05) == set(rejected)
