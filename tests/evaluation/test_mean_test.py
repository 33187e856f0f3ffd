"""The p-values of a mean against closed forms and against resampling."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.evaluation.mean_test import compute_lower_bounds, compute_p_values


@pytest.mark.parametrize(("value", "worst"), [(0.3, -0.9), (1.0, -1e-3), (1e-4, -1.0)])
@pytest.mark.parametrize("count", [1, 2, 16, 128, 1000])
def test_equal_values_have_a_closed_form(value: float, worst: float, count: int) -> None:
    """P(value * Gamma(n) <= |worst| * E) is ((|worst| / (value + |worst|)) to the n."""
    expected = (-worst / (value - worst)) ** count
    p_value = compute_p_values([value] * count, worst)
    assert p_value == pytest.approx(expected, rel=1e-8, abs=1e-300)


@pytest.mark.parametrize(("failures", "count"), [(0, 20), (1, 20), (5, 20), (12, 64)])
def test_two_values_give_the_exact_binomial_test(failures: int, count: int) -> None:
    """With values a and -b, "the mean is at most 0" is "failures have at least the share a / (a +
    b)", and the p-value is the chance of as few or fewer of them.
    """
    gain, loss = 0.25, 0.75
    share = gain / (gain + loss)
    values = [gain] * (count - failures) + [-loss] * failures
    expected = sum(
        math_comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(failures + 1)
    )
    assert compute_p_values(values, -loss) == pytest.approx(expected, rel=1e-9)


def math_comb(count: int, k: int) -> float:
    return float(np.prod([(count - i) / (i + 1) for i in range(k)]))


@pytest.mark.parametrize("count", [2, 5, 30])
def test_the_integral_is_the_share_of_random_weightings_below_zero(count: int) -> None:
    generator = np.random.default_rng(count)
    values = generator.normal(0.3, 1.0, count)
    worst = min(values.min(), -2.0)
    weights = generator.exponential(size=(200_000, count + 1))
    share = (weights @ [worst, *values] <= 0).mean()
    error = np.sqrt(share * (1 - share) / 200_000)
    assert compute_p_values(values, worst) == pytest.approx(share, abs=4 * error)


def test_signs_that_do_not_mix_need_no_integral() -> None:
    assert compute_p_values([0.1, 0.2], 0.0) == 0
    assert compute_p_values([-0.1, 0.0], -1.0) == 1
    assert compute_p_values([0.0, 0.0], 0.0) == 1


@given(
    st.lists(st.floats(-1, 1), min_size=2, max_size=40),
    st.floats(1e-6, 1e6),
    st.floats(1.0, 5.0),
)
@settings(max_examples=50, deadline=None)
def test_it_is_a_probability_that_falls_with_the_values_and_knows_no_scale(
    values: list[float], scale: float, depth: float
) -> None:
    array = np.array(values)
    p_value = compute_p_values(array, -depth)
    assert 0 <= p_value <= 1
    assert compute_p_values(array * scale, -depth * scale) == pytest.approx(p_value, abs=1e-9)
    assert compute_p_values(array + 0.1, -depth) <= p_value + 1e-9
    assert compute_p_values(array, -2 * depth) >= p_value - 1e-9


def test_rows_are_independent_of_each_other() -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(0.2, 1.0, (3, 4, 20))
    whole = compute_p_values(values, -4.0)
    alone = compute_p_values(values[1, 2], -4.0)
    assert whole.shape == (3, 4)
    assert whole[1, 2] == pytest.approx(alone, rel=1e-9)


def test_a_bound_is_where_the_test_stops_to_reject() -> None:
    values = np.random.default_rng(1).normal(0.5, 1.0, 40)
    bound = float(compute_lower_bounds(values, -3.0, 0.025))
    below, above = (
        compute_p_values(values - shifted, -3.0 - shifted)
        for shifted in (bound - 1e-6, bound + 1e-6)
    )
    assert below < 0.025 < above


@pytest.mark.parametrize(
    ("values", "worst", "message"),
    [
        ([], -1.0, "got 0"),
        ([0.1, np.nan], -1.0, "1 are not finite"),
        ([-0.5, 0.1], -0.2, "below the lowest possible"),
    ],
)
def test_what_cannot_be_tested_is_an_error(values: list[float], worst: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_p_values(values, worst)
