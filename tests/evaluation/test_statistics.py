"""The paired bootstrap against what is known in closed form, and the join that feeds it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.data.schema import build_evaluation_schema
from ebbflow.evaluation import statistics
from ebbflow.evaluation.statistics import (
    compare_metric,
    compute_paired_bootstrap,
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


def test_the_interval_covers_the_true_mean_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    runs = 400
    prompts = 40
    true = 0.3
    covered = 0
    for seed in range(runs):
        difference = generator.normal(true, 1.0, prompts)
        _, low, high = compute_paired_bootstrap(difference, np.zeros(prompts), 500, 0.9, seed)
        covered += low <= true <= high
    spread = np.sqrt(0.9 * 0.1 / runs)
    assert abs(covered / runs - 0.9) < 3 * spread + 0.01


def test_the_interval_is_the_normal_one_for_many_prompts() -> None:
    difference = np.random.default_rng(1).normal(0.1, 0.5, 2000)
    mean, low, high = compute_paired_bootstrap(difference, np.zeros(2000), 4000, 0.95, 0)
    half = 1.96 * difference.std(ddof=1) / np.sqrt(2000)
    assert mean == pytest.approx(difference.mean())
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.1 * half)


def test_pairing_removes_the_spread_between_prompts() -> None:
    easy_and_hard = np.random.default_rng(2).uniform(0, 1, 100)
    difference, low, high = compute_paired_bootstrap(
        easy_and_hard + 0.01, easy_and_hard, 500, 0.95, 0
    )
    assert (difference, low, high) == pytest.approx((0.01, 0.01, 0.01))


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=30), st.integers(0, 2**31))
def test_it_is_deterministic_antisymmetric_and_contains_the_mean(
    values: list[float], seed: int
) -> None:
    candidate = np.array(values)
    champion = np.zeros(len(values))
    difference, low, high = compute_paired_bootstrap(candidate, champion, 200, 0.95, seed)
    assert (difference, low, high) == compute_paired_bootstrap(candidate, champion, 200, 0.95, seed)
    assert compute_paired_bootstrap(champion, candidate, 200, 0.95, seed) == pytest.approx(
        (-difference, -high, -low)
    )
    assert low - 1e-12 <= high


def test_memory_is_bounded_without_changing_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(3).normal(size=50)
    whole = compute_paired_bootstrap(values, np.zeros(50), 1000, 0.95, 7)
    monkeypatch.setattr(statistics, "DRAWS_PER_CHUNK", 50 * 64)
    assert compute_paired_bootstrap(values, np.zeros(50), 1000, 0.95, 7) == whole


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
        compute_paired_bootstrap(np.array(candidate), np.array(champion), 100, 0.95, 0)


def test_compare_joins_on_prompt_and_sample_whatever_the_order() -> None:
    candidate = table({(2, 0): 0.9, (1, 0): 0.7, (3, 0): 0.8})
    champion = table({(1, 0): 0.5, (3, 0): 0.5, (2, 0): 0.5})
    result = compare_metric("reward", candidate, champion, resamples=500)
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


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=30), st.integers(0, 2**31))
def test_the_test_agrees_with_the_interval(values: list[float], seed: int) -> None:
    differences = np.array(values)
    _, low, _ = compute_paired_bootstrap(differences, np.zeros(len(values)), 200, 0.9, seed)
    p_value = compute_paired_tail(differences, 200, seed)
    # The quantile lies between two resampled means, one to either side of the share.
    assert low <= 1e-12 if p_value > 0.05 + 1 / 200 else p_value > 0.05 - 1 / 200 or low >= -1e-12


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
