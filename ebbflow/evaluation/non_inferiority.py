"""Whether the candidate's pictures are still like the champion's: a test of non-inferiority for
every image statistic.

The candidate has to prove that a statistic moved by less than its margin: a wide interval refuses.
For a margin d and the prompts' paired differences x the hypothesis "the mean of x is at most -d"
must be rejected, and "the mean is at least d" where a rise is as suspicious as a fall (two
one-sided tests: Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15, 1987). The
p-values are those of the paired bootstrap over prompts, corrected for the number of hypotheses as
Holm does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ebbflow.data.records import Comparison
from ebbflow.data.schema import name_statistic_column
from ebbflow.evaluation.statistics import (
    average_over_prompts,
    compare_metric,
    compute_paired_tail,
    pair_held_out_samples,
    reject_by_holm,
)
from ebbflow.formatting import format_difference, format_number
from ebbflow.recipe import Recipe

MIN_MARGIN = 0.01
"""Least margin, as most statistics lie between 0 and 1: where the champion's images are all alike,
a spread is no measure.
"""
SHARES = {"diversity_latents", "diversity_pixels", "diversity_features"}
"""Statistics whose margin is a share of the champion's mean; all others count in standard
deviations of its prompts.
"""
ONLY_FALLS = {*SHARES, "diversity_across_prompts", "sharpness"}
"""More diversity is no harm. Sharpness rises as an honest policy draws more clearly; grain shows in
entropy and edges, too.
"""
ONLY_RISES = {"text_likeness"}
"""Less text is no harm: what is feared is text that was drawn for the judge."""


class StatisticFinding(NamedTuple):
    """What the gate says about a statistic: ``comparison`` is None where it could not be tested."""

    passed: bool
    reason: str
    comparison: Comparison | None


class _Hypothesis(NamedTuple):
    """That a statistic falls, or rises, by its margin or more."""

    statistic: str
    change: str
    margin: float
    p_value: float


def check_statistics(
    recipe: Recipe, candidate: pa.Table, champion: pa.Table
) -> list[StatisticFinding]:
    """A finding for each statistic that has a margin and was measured, over the held-out
    prompts."""
    findings: list[StatisticFinding] = []
    hypotheses: list[_Hypothesis] = []
    for statistic, margin in select_statistic_margins(recipe).items():
        missing = _explain_missing_statistic(statistic, candidate, champion)
        if missing is None:
            hypotheses += _build_hypotheses(recipe, statistic, margin, candidate, champion)
        elif missing:
            findings.append(StatisticFinding(False, f"Statistic {statistic} {missing}", None))
    alpha = (1 - recipe.evaluation.confidence) / 2
    rejected = reject_by_holm(
        {f"{one.statistic} {one.change}": one.p_value for one in hypotheses}, alpha
    )
    for statistic in dict.fromkeys(one.statistic for one in hypotheses):
        own = [one for one in hypotheses if one.statistic == statistic]
        kept = [one for one in own if f"{one.statistic} {one.change}" not in rejected]
        findings.append(_build_finding(recipe, own[0], kept, candidate, champion))
    return findings


def select_statistic_margins(recipe: Recipe) -> dict[str, float]:
    """The margin of each statistic that is tested. Text is not feared where a trained reward reads
    the image.
    """
    margins = recipe.promotion.margins.model_dump()
    if any(reward.reads for reward in recipe.rewards):
        margins.pop("text_likeness")
    return {name: margin for name, margin in margins.items() if margin is not None}


def _explain_missing_statistic(
    statistic: str, candidate: pa.Table, champion: pa.Table
) -> str | None:
    """What of a statistic is missing: None if nothing, "" if neither side measured it."""
    column = name_statistic_column(statistic)
    sides = {"candidate": candidate, "champion": champion}
    absent = [side for side, table in sides.items() if column not in table.column_names]
    if len(absent) == 2:
        return ""
    if absent:
        return f"was not measured on the {absent[0]}; evaluate both with it"
    finite = np.isfinite(
        pair_held_out_samples(column, candidate, champion)[["candidate", "champion"]].to_numpy()
    )
    measured = finite[finite.any(axis=1)]
    if not len(measured):
        return ""
    if not measured.all():
        lost, before = (~measured).sum(axis=0)
        return (
            f"is missing on {lost} held-out samples of the candidate and on {before} of the"
            " champion; evaluate both again"
        )
    return None


def _build_hypotheses(
    recipe: Recipe, statistic: str, relative: float, candidate: pa.Table, champion: pa.Table
) -> Iterator[_Hypothesis]:
    means = average_over_prompts(name_statistic_column(statistic), candidate, champion)
    unit = means["champion"].mean() if statistic in SHARES else means["champion"].std()
    margin = max(relative * float(unit), MIN_MARGIN)
    difference = (means["candidate"] - means["champion"]).to_numpy()
    for change, sign in (("fall", 1), ("rise", -1)):
        if statistic not in (ONLY_RISES if change == "fall" else ONLY_FALLS):
            p_value = compute_paired_tail(
                sign * difference + margin, recipe.evaluation.resamples, recipe.seed
            )
            yield _Hypothesis(statistic, change, margin, p_value)


def _build_finding(
    recipe: Recipe,
    tested: _Hypothesis,
    kept: list[_Hypothesis],
    candidate: pa.Table,
    champion: pa.Table,
) -> StatisticFinding:
    rule = recipe.evaluation
    comparison = compare_metric(
        name_statistic_column(tested.statistic),
        candidate,
        champion,
        resamples=rule.resamples,
        confidence=rule.confidence,
        seed=recipe.seed,
    ).model_copy(update={"metric": tested.statistic})
    moved = (
        f"Statistic {tested.statistic} went from {format_number(comparison.champion)} to"
        f" {format_number(comparison.candidate)} ({format_difference(comparison.difference)}) over"
        f" {comparison.prompts} prompts"
    )
    if not kept:
        return StatisticFinding(
            True, f"{moved}, within the margin of {format_number(tested.margin)}.", comparison
        )
    worst = max(kept, key=lambda one: one.p_value)
    fix = f"look at the samples, or set promotion.margins.{tested.statistic}"
    reason = (
        f"{moved}: a {worst.change} of {format_number(worst.margin)} or more is not ruled out (p ="
        f" {worst.p_value:.3g}); {fix}"
    )
    return StatisticFinding(False, f"{reason}.", comparison)
