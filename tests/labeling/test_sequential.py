"""The sequential test: closed forms, and its errors by simulation."""

from __future__ import annotations

from math import comb, exp

import numpy as np
import pytest

from ebbflow.labeling.sequential import (
    compute_log_mixture,
    find_confidence_interval,
    run_sequential_test,
)

ERROR_RATE = 0.05
FLIPS = 200
RUNS = 2000


def simulated(p: float, seed: int) -> np.ndarray:
    """Whether each run ever decides, and for whom: [runs] of "candidate", "champion" or None."""
    flips = np.random.default_rng(seed).random((RUNS, FLIPS)) < p
    return np.array(
        [run_sequential_test(run.tolist(), ERROR_RATE).preferred for run in flips], dtype=object
    )


@pytest.mark.parametrize(("successes", "failures"), [(0, 0), (1, 0), (3, 5), (40, 2)])
def test_the_mixture_is_the_closed_form(successes: int, failures: int) -> None:
    count = successes + failures
    assert exp(compute_log_mixture(successes, failures)) == pytest.approx(
        2**count / ((count + 1) * comb(count, successes))
    )


def test_the_mixture_is_the_integral_over_the_prior() -> None:
    p = (np.arange(200_000) + 0.5) / 200_000
    assert exp(compute_log_mixture(7, 3, 0.3)) == pytest.approx(
        np.mean((p / 0.3) ** 7 * ((1 - p) / 0.7) ** 3), rel=1e-6
    )


@pytest.mark.parametrize("p", [0.5, 0.2])
def test_the_mixture_is_a_martingale(p: float) -> None:
    for successes in range(6):
        for failures in range(6):
            now = exp(compute_log_mixture(successes, failures, p))
            then = p * exp(compute_log_mixture(successes + 1, failures, p)) + (1 - p) * exp(
                compute_log_mixture(successes, failures + 1, p)
            )
            assert then == pytest.approx(now)


def test_a_coin_is_rarely_decided_although_it_is_looked_at_after_every_flip() -> None:
    decided = simulated(0.5, seed=1) != None  # noqa: E711
    assert 0.005 < decided.mean() <= ERROR_RATE


def test_the_usual_test_would_err_often_if_it_were_looked_at_that_often() -> None:
    flips = np.random.default_rng(1).random((RUNS, FLIPS)) < 0.5
    counts = np.arange(1, FLIPS + 1)
    scores = np.abs(2 * flips.cumsum(axis=1) - counts) / np.sqrt(counts)
    assert (scores[:, 9:] > 1.96).any(axis=1).mean() > 4 * ERROR_RATE


@pytest.mark.parametrize("p", [0.3, 0.45])
def test_a_worse_candidate_is_hardly_ever_preferred(p: float) -> None:
    assert (simulated(p, seed=2) == "candidate").mean() <= ERROR_RATE / 2


def test_a_better_candidate_is_found() -> None:
    assert (simulated(0.7, seed=3) == "candidate").mean() > 0.98


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_the_confidence_sequence_has_the_true_share_at_all_times(p: float) -> None:
    flips = np.random.default_rng(4).random((300, 60)) < p
    missed = 0
    for run in flips:
        heads = run.cumsum()
        intervals = [
            find_confidence_interval(int(heads[n - 1]), n - int(heads[n - 1]), ERROR_RATE)
            for n in range(1, 61)
        ]
        missed += any(not low <= p <= high for low, high in intervals)
    assert missed / 300 <= ERROR_RATE


@pytest.mark.parametrize(
    "outcomes", [[], [True], [False] * 4, [True, False] * 20, [True] * 9 + [False]]
)
def test_the_interval_leaves_out_one_half_exactly_when_the_mixture_is_large(
    outcomes: list[bool],
) -> None:
    found = run_sequential_test(outcomes, ERROR_RATE)
    assert (
        0
        <= found.low
        <= (found.candidate / max(1, len(outcomes)) if outcomes else 0.5)
        <= found.high
        <= 1
    )
    rejects = exp(compute_log_mixture(found.candidate, found.champion)) >= 1 / ERROR_RATE
    assert rejects == (not found.low <= 0.5 <= found.high)


def test_nothing_is_known_before_the_first_outcome() -> None:
    found = run_sequential_test([], ERROR_RATE)
    assert (found.low, found.high, found.p_value, found.decided_after) == (0, 1, 1, None)


def test_a_decision_stays_although_later_outcomes_are_others() -> None:
    found = run_sequential_test([True] * 10 + [False] * 12, ERROR_RATE)
    # After n flips for one side M = 2^n / (n + 1), which first exceeds 20 at n = 8.
    assert (found.decided_after, found.preferred) == (8, "candidate")
    assert found.p_value == pytest.approx(11 / 2**10)


@pytest.mark.parametrize("error_rate", [0, 1, -0.1, 5])
def test_an_error_rate_is_a_probability(error_rate: float) -> None:
    with pytest.raises(ValueError, match="not between 0 and 1"):
        run_sequential_test([], error_rate)
