"""Krippendorff's alpha: the examples of its author, its limits, and what it becomes for two
raters."""

from __future__ import annotations

import numpy as np
import pytest

from ebbflow.labeling.agreement import compute_krippendorff_alpha


def units(*raters: str) -> list[list[str]]:
    """Of each unit what was said; a row per rater, a dot is a missing answer."""
    return [[answer for answer in column if answer != "."] for column in zip(*raters, strict=True)]


@pytest.mark.parametrize(
    ("raters", "alpha"),
    [
        (("0100000010", "1110010000"), 0.095),
        (("aabbdcccedda", "babbbccceddd"), 0.692),
        (("123321412...", "1233224125.3", ".3332342251.", "1233244125" + "1."), 0.743),
    ],
)
def test_the_examples_of_krippendorff_2011(raters: tuple[str, ...], alpha: float) -> None:
    assert compute_krippendorff_alpha(units(*raters)) == pytest.approx(alpha, abs=5e-4)


def test_two_raters_without_gaps_are_scotts_pi_with_the_correction_for_few_units() -> None:
    first, second = np.random.default_rng(0).integers(0, 3, (2, 50))
    second = np.where(np.random.default_rng(1).random(50) < 0.6, first, second)
    shares = np.bincount(np.concatenate([first, second])) / 100
    pi = ((first == second).mean() - (shares**2).sum()) / (1 - (shares**2).sum())
    alpha = compute_krippendorff_alpha(
        [list(unit) for unit in zip(first.tolist(), second.tolist(), strict=True)]
    )
    assert alpha == pytest.approx(1 - (1 - pi) * 99 / 100)


def test_krippendorff_alpha_has_its_limits() -> None:
    assert compute_krippendorff_alpha(units("lrlrt", "lrlrt", "lrlrt")) == 1
    assert compute_krippendorff_alpha(units("lrlr", "rlrl")) < 0
    chance = np.random.default_rng(2).integers(0, 2, (400, 3)).tolist()
    assert compute_krippendorff_alpha(chance) == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize(
    "answers", [[], [["left"], ["right"]], [["left", "left"], ["left", "left"]]]
)
def test_there_is_no_alpha_without_two_answers_that_could_differ(answers: list[list[str]]) -> None:
    assert compute_krippendorff_alpha(answers) is None
