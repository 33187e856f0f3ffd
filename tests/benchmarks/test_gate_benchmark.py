"""A short year of the gate: the error budget holds, and what used to pass is refused.

Bounds are binomial: a true share of p is above p + 4 sqrt(p (1 - p) / n) once in 30,000 seeds.
"""

from __future__ import annotations

import math

import pytest

from benchmarks import gate, gate_report
from ebbflow.recipe import Recipe
from ebbflow.recipe.guardrails import MIN_PROMPTS
from ebbflow.recipe.promotion import PromotionConfig

YEARS = 120
LOOKS = 1000


def bound(share: float, repetitions: int) -> float:
    return share + 4 * math.sqrt(share * (1 - share) / repetitions)


@pytest.mark.parametrize("prompts", [64, 128])
def test_a_year_of_equal_candidates_promotes_one_in_at_most_a_twentieth_of_years(
    prompts: int,
) -> None:
    year = gate.simulate_year(YEARS, prompts)
    budget = PromotionConfig().error_budget
    assert (year.false_promotions > 0).mean() <= bound(budget, YEARS)
    # And the simulation sees what it should: the gate before promoted one in every third year.
    years = YEARS // 3
    before = gate.simulate_year(years, prompts, old=True)
    assert (before.false_promotions > 0).mean() > 0.34 - 4 * math.sqrt(0.34 * 0.66 / years)


@pytest.mark.parametrize("prompts", [64, 128])
def test_a_year_of_disasters_promotes_one_in_at_most_a_twentieth_of_years(prompts: int) -> None:
    year = gate.simulate_year(YEARS, prompts, disasters=True)
    # Most samples of 128 prompts without a disaster have a p-value of about (1 + .02 / .5)^-128 =
    # .0066, above the share of the budget; one in 740 samples has none, and a year 52 looks.
    assert (year.false_promotions > 0).mean() == 0


@pytest.mark.parametrize("kind", gate.KINDS)
@pytest.mark.parametrize("prompts", [24, 64])
def test_one_look_is_as_often_wrong_as_it_says(kind: str, prompts: int) -> None:
    shares = gate.simulate_one_look(LOOKS, prompts, kind)
    assert shares["now"] <= bound(gate.ONE_LOOK, LOOKS)
    if kind.startswith("disasters"):
        assert shares["before"] > 0.1


def test_no_test_that_keeps_the_budget_gains_much_from_one_sample_of_64_prompts() -> None:
    ideal = gate.simulate_year(YEARS, 64, spread=0.1, ideal=True)
    assert ideal.gain.mean() < 0.13 / 2


def test_a_year_with_the_defaults_of_a_recipe_finds_gains() -> None:
    recipe = Recipe()
    assert recipe.count_repeated(recipe.prompts.held_out) == recipe.prompts.held_out
    year = gate.simulate_year(
        YEARS, recipe.prompts.held_out, samples=recipe.evaluation.samples, spread=0.1
    )
    # Seen in 500 years: .157, with a standard deviation of .08 between years.
    assert year.gain.mean() > 0.13 - 3 * 0.08 / math.sqrt(YEARS)
    assert (year.false_promotions > 0).mean() <= bound(0.05, YEARS)


@pytest.mark.parametrize("fall", [0.04, 0.01])
def test_a_ratchet_stops_at_the_cumulative_tolerance(fall: float) -> None:
    tolerance = PromotionConfig().anchor_tolerance
    assert tolerance is not None
    year = gate.simulate_ratchet(20, 64, fall)
    # A step beyond it passes with a probability of 2.5 %, and then the next ones hardly.
    assert year.fall.mean() <= tolerance + 2 * fall
    before = gate.simulate_ratchet(20, 64, fall, old=True)
    assert before.fall.mean() == pytest.approx(52 * fall, rel=0.1)


@pytest.mark.parametrize("prompts", [24, 64, 128])
@pytest.mark.parametrize("concentrated", [False, True])
def test_a_guardrail_that_fell_by_its_tolerance_passes_as_rarely_as_promised(
    prompts: int, concentrated: bool
) -> None:
    tolerance = PromotionConfig().guardrail_tolerance.default
    share = gate.simulate_guardrail(4 * LOOKS, prompts, tolerance, concentrated=concentrated)
    assert share <= bound(gate.ONE_LOOK, 4 * LOOKS)


def test_no_error_of_the_page_is_above_3_percent_and_few_prompts_are_refused() -> None:
    """Of the committed table: looks at candidates that are no better, and at fallen guardrails."""
    page = gate_report.RESULTS.read_text()
    rows = [
        line.strip("| ").split(" | ")
        for title in ("## One look", "## Guardrails that pass")
        for line in page.split(title)[1].split("\n## ")[0].splitlines()
        if "→" in line and not line.startswith("| unchanged")
    ]
    assert len(rows) == len(gate.KINDS) + 3
    for _, few, *cells in rows:
        assert few.endswith("→ refused")
        assert len(cells) == len(gate_report.NUMBERS) - 1
        assert all(float(cell.split("→")[1].strip(" %")) <= 3 for cell in cells)
    assert gate_report.NUMBERS[0] < MIN_PROMPTS == gate_report.NUMBERS[1]


def test_guardrails_are_tested_by_proof() -> None:
    tolerance = PromotionConfig().guardrail_tolerance.default
    assert gate.simulate_guardrail(LOOKS, 64, 2 * tolerance) == 0
    assert gate.simulate_guardrail(LOOKS, 128, 0.0) > 0.9
