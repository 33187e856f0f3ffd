"""How numbers are written for people."""

from __future__ import annotations

import math

import pytest

from ebbflow.formatting import format_difference, format_duration, format_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1.00"),
        (0.5298, "0.530"),
        (0.00213, "0.00213"),
        (0.0000213, "2.13e-5"),
        (12.345, "12.3"),
        (123.4, "123"),
        (-999.7, "-1,000"),
        (1234567.0, "1,234,567"),
        (math.nan, "–"),
        (math.inf, "–"),
        (None, "–"),
    ],
)
def test_numbers_have_significant_digits_on_every_scale(value: float | None, text: str) -> None:
    assert format_number(value) == text


def test_a_difference_has_a_sign() -> None:
    assert [format_difference(value) for value in (0.25, -0.25, 0.0, -2e-6)] == [
        "+0.250",
        "-0.250",
        "+0",
        "-2.00e-6",
    ]


def test_a_duration_has_its_two_largest_units() -> None:
    assert [format_duration(seconds) for seconds in (4.21, 95, 7260)] == [
        "4.2 s",
        "1 min 35 s",
        "2 h 01 min",
    ]
