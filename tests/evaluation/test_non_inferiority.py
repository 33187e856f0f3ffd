"""A statistic keeps the candidate back unless its change is proven to be small."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from ebbflow.data.schema import build_evaluation_schema, name_statistic_column
from ebbflow.evaluation.non_inferiority import (
    StatisticFinding,
    check_statistics,
    select_statistic_margins,
)
from ebbflow.recipe import Recipe

PROMPTS = 40
MARGINS = {"entropy": 1.0, "brightness": 1.0, "diversity_pixels": 0.1, "text_likeness": 1.0}


def make_recipe(rewards: list[str] | None = None, **margins: float | None) -> Recipe:
    switched_off = dict.fromkeys(Recipe().promotion.margins.model_dump())
    promotion = {"margins": switched_off | MARGINS | margins}
    return Recipe.model_validate(
        {
            "rewards": rewards or ["jpeg_compressibility"],
            "evaluation": {"resamples": 1000},
            "promotion": promotion,
        }
    )


def table(
    spread: float = 0.0,
    missing: int = 0,
    seed: int = 1,
    prompts: int = PROMPTS,
    **means: float | None,
) -> pa.Table:
    """An evaluation whose statistics have the standard deviation ``spread`` over the prompts; the
    first ``missing`` lack them.
    """
    draws = np.random.default_rng(seed).normal(0, 1, prompts)
    draws = (draws - draws.mean()) / draws.std(ddof=1)
    rows = [
        {
            "prompt_id": i,
            "sample": 0,
            "split": "held_out",
            "prompt": "p",
            "target": None,
            "image": b"",
            "reward": 0.5,
        }
        | {
            name_statistic_column(name): None
            if mean is None or i < missing
            else mean + spread * draws[i]
            for name, mean in means.items()
        }
        for i in range(prompts)
    ]
    return pa.Table.from_pylist(rows, schema=build_evaluation_schema(["reward"], list(means)))


def refused(findings: list[StatisticFinding]) -> list[str]:
    return [finding.reason for finding in findings if not finding.passed]


SAME = {"entropy": 0.5, "brightness": 0.5, "diversity_pixels": 0.5, "text_likeness": 0.5}


@pytest.mark.parametrize(
    ("changed", "passes"),
    [
        ({}, True),
        ({"entropy": 0.46}, True),
        ({"entropy": 0.54}, True),
        ({"entropy": 0.44}, False),
        ({"entropy": 0.56}, False),
        ({"brightness": 0.8}, False),
        ({"diversity_pixels": 0.2}, False),
        ({"diversity_pixels": 0.9}, True),
        ({"text_likeness": 0.1}, True),
        ({"text_likeness": 0.6}, False),
    ],
)
def test_a_statistic_may_move_by_its_margin_in_the_direction_that_is_feared(
    changed: dict[str, float], passes: bool
) -> None:
    findings = check_statistics(make_recipe(), table(0.05, **SAME | changed), table(0.05, **SAME))
    assert len(findings) == 4
    reasons = refused(findings)
    assert (not reasons) == passes
    assert all(f"promotion.margins.{name}" in reasons[0] for name in changed if reasons)


@pytest.mark.parametrize(
    ("statistic", "moved", "passes"),
    [
        ("diversity_across_prompts", -1.41, True),
        ("diversity_across_prompts", -1.65, False),
        ("entropy", 2.62, True),
        ("entropy", 3.62, False),
    ],
)
def test_default_margins_tell_the_widest_honest_move_from_planted_ones(
    statistic: str, moved: float, passes: bool
) -> None:
    """Moves of runs of ``benchmarks.reward_hacking``, in standard deviations of its 96 prompts."""
    margin = Recipe().promotion.margins.model_dump()[statistic]
    recipe = make_recipe(**(dict.fromkeys(MARGINS) | {statistic: margin}))
    spread = 0.03
    champion = table(spread, prompts=96, **{statistic: 0.5})
    # The paired differences have a standard deviation of 1.2 spreads, as in those runs.
    candidate = table(0.6 * spread, seed=2, prompts=96, **{statistic: 0.5 + moved * spread})
    assert (not refused(check_statistics(recipe, candidate, champion))) == passes


def test_a_small_change_that_is_not_proven_keeps_the_candidate_back() -> None:
    champion = table(0.05, **SAME)
    assert len(refused(check_statistics(make_recipe(), table(0.3, seed=2, **SAME), champion))) == 4
    assert not refused(check_statistics(make_recipe(), table(0.05, seed=2, **SAME), champion))


def test_a_margin_counts_standard_deviations_of_the_champion_and_is_never_next_to_nothing() -> None:
    for spread, passes in ((0.05, True), (0.03, False)):
        findings = check_statistics(
            make_recipe(), table(spread, entropy=0.54), table(spread, entropy=0.5)
        )
        assert (not refused(findings)) == passes
    assert not refused(
        check_statistics(make_recipe(), table(brightness=0.005), table(brightness=0.0))
    )
    assert refused(check_statistics(make_recipe(), table(brightness=0.02), table(brightness=0.0)))


@pytest.mark.parametrize("name", ["diversity_latents", "diversity_pixels", "diversity_features"])
def test_a_margin_of_the_diversity_within_a_prompt_is_a_share(name: str) -> None:
    recipe = make_recipe(**{name: 0.5})
    for moved, passes in ((0.6, True), (0.4, False)):
        (finding,) = check_statistics(
            recipe, table(0.01, **{name: moved}), table(0.01, **{name: 1.0})
        )
        assert finding.passed == passes


def test_a_margin_of_null_is_no_test() -> None:
    findings = check_statistics(
        make_recipe(entropy=None), table(**SAME | {"entropy": 0.1}), table(**SAME)
    )
    assert len(findings) == 3
    assert not refused(findings)


def test_text_is_not_feared_where_a_trained_reward_reads() -> None:
    assert "text_likeness" in select_statistic_margins(make_recipe(["jpeg_compressibility"]))
    assert "text_likeness" not in select_statistic_margins(
        make_recipe(["jpeg_compressibility", "ocr"])
    )


def test_what_one_side_lacks_keeps_the_candidate_back() -> None:
    (reason,) = refused(
        check_statistics(make_recipe(), table(entropy=0.5), table(entropy=0.5, brightness=0.5))
    )
    assert "brightness was not measured on the candidate" in reason
    (reason,) = refused(
        check_statistics(
            make_recipe(), table(entropy=0.5, missing=3), table(entropy=0.5, missing=1)
        )
    )
    assert "missing on 2 held-out samples of the candidate and on 0 of the champion" in reason


def test_what_neither_side_measured_is_no_test() -> None:
    assert (
        check_statistics(make_recipe(), table(diversity_pixels=None), table(diversity_pixels=None))
        == []
    )
    repeated = table(diversity_pixels=0.5, missing=30)  # only some prompts have several samples
    (finding,) = check_statistics(make_recipe(), repeated, repeated)
    assert finding.comparison is not None
    assert finding.comparison.prompts == 10


def test_the_number_of_statistics_counts() -> None:
    """A change that one test alone would pass is not proven among many."""
    alone = {"entropy": 1.0, "brightness": None, "diversity_pixels": None, "text_likeness": None}
    candidate = table(0.12, seed=3, **SAME)
    champion = table(0.05, **SAME)
    assert not refused(check_statistics(make_recipe(**alone), candidate, champion))
    assert refused(check_statistics(make_recipe(), candidate, champion))
