"""The best of several samples, against all choices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ebbflow.evaluation.distribution import estimate_best_of


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_best_of_k_is_the_mean_over_all_choices(k: int) -> None:
    values = np.random.default_rng(0).normal(size=(4, 5))
    expected = np.mean([max(choice) for row in values for choice in itertools.combinations(row, k)])
    assert estimate_best_of(np.repeat(np.arange(4), 5), values.ravel(), k, 5) == pytest.approx(
        expected
    )


def test_prompts_with_too_few_finite_samples_are_left_out() -> None:
    ids = np.array([0, 0, 1, 1, 2])
    values = np.array([0.1, 0.3, 0.9, np.nan, 0.8])
    assert estimate_best_of(ids, values, 2, 2) == pytest.approx(0.3)
    assert estimate_best_of(ids, values, 1, 2) == pytest.approx(0.2)
    assert estimate_best_of(ids, values, 3, 3) is None
