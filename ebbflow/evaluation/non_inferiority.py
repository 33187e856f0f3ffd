"""The test that the candidate's pictures are still like the champion's: non-inferiority of every
image statistic.

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
    """The hypothesis that a statistic falls, or rises, by its margin or more."""

    statistic: str
    change: str
    margin: float
    p_value: float


def check_statistics(
    recipe: Recipe, candidate: pa.Table, champion: pa.Table
) -> list[StatisticFinding]:
    """Return a finding for each statistic that has a margin and was measured, over the held-out
    prompts.
    """
    findings: list[StatisticFinding] = []
    hypotheses: list[_Hypothesis] = []
    for statistic, margin in select_statistic_margins(recipe).items():
        # None: it was measured. "": on neither side, so that nothing is tested.
        missing = _explain_missing_statistic(statistic, candidate, champion)
        if missing is None:
            hypotheses += _build_hypotheses(recipe, statistic, margin, candidate, champion)
        elif missing:
            findings.append(StatisticFinding(False, f"Statistic {statistic} {missing}", None))
    # One-sided, hence half of what the confidence interval leaves out. All hypotheses are corrected
    # together: 20 tests at 2.5 % each reject a true hypothesis by chance in up to 40 % of the runs.
    alpha = (1 - recipe.evaluation.confidence) / 2
    p_values = {f"{one.statistic} {one.change}": one.p_value for one in hypotheses}
    rejected = reject_by_holm(p_values, alpha)
    # In the order of the margins; a fall and a rise of one statistic are one finding.
    for statistic in dict.fromkeys(one.statistic for one in hypotheses):
        tested = [one for one in hypotheses if one.statistic == statistic]
        not_rejected = [one for one in tested if f"{one.statistic} {one.change}" not in rejected]
        findings.append(_build_finding(recipe, tested[0], not_rejected, candidate, champion))
    return findings


def select_statistic_margins(recipe: Recipe) -> dict[str, float]:
    """Return the margin of each statistic that is tested."""
    margins = recipe.promotion.margins.model_dump()
    # Where a trained reward reads the image, more text is what was asked for.
    if any(reward.reads for reward in recipe.rewards):
        margins.pop("text_likeness")
    return {name: margin for name, margin in margins.items() if margin is not None}


def _explain_missing_statistic(
    statistic: str, candidate: pa.Table, champion: pa.Table
) -> str | None:
    """Explain what of a statistic is missing: None if nothing, "" if neither side measured it."""
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
    # Diversity has values for repeated samples alone: rows that neither side has are not missing.
    measured = finite[finite.any(axis=1)]
    if not len(measured):
        return ""
    if not measured.all():
        missing_here, missing_there = (~measured).sum(axis=0)
        return (
            f"is missing on {missing_here} held-out samples of the candidate and on {missing_there}"
            " of the champion; evaluate both again"
        )
    return None


def _build_hypotheses(
    recipe: Recipe, statistic: str, relative: float, candidate: pa.Table, champion: pa.Table
) -> Iterator[_Hypothesis]:
    """Build the hypotheses that have to be rejected: of a fall, of a rise, or of both."""
    means = average_over_prompts(name_statistic_column(statistic), candidate, champion)
    unit = means["champion"].mean() if statistic in SHARES else means["champion"].std()
    margin = max(relative * float(unit), MIN_MARGIN)
    difference = (means["candidate"] - means["champion"]).to_numpy()
    # A fall by the margin: the mean of x is at most -d, so that of x + d at most 0. A rise by the
    # margin is the same of -x.
    shifted = {}
    if statistic not in ONLY_RISES:
        shifted["fall"] = difference + margin
    if statistic not in ONLY_FALLS:
        shifted["rise"] = -difference + margin
    for change, values in shifted.items():
        p_value = compute_paired_tail(values, recipe.evaluation.resamples, recipe.seed)
        yield _Hypothesis(statistic, change, margin, p_value)


def _build_finding(
    recipe: Recipe,
    tested: _Hypothesis,
    not_rejected: list[_Hypothesis],
    candidate: pa.Table,
    champion: pa.Table,
) -> StatisticFinding:
    """Build the finding of a statistic: it passes if all of its hypotheses were rejected."""
    rule = recipe.evaluation
    comparison = compare_metric(
        name_statistic_column(tested.statistic),
        candidate,
        champion,
        confidence=rule.confidence,
    ).model_copy(update={"metric": tested.statistic})
    moved = (
        f"Statistic {tested.statistic} went from {format_number(comparison.champion)} to"
        f" {format_number(comparison.candidate)} ({format_difference(comparison.difference)}) over"
        f" {comparison.prompts} prompts"
    )
    if not not_rejected:
        return StatisticFinding(
            True, f"{moved}, within the margin of {format_number(tested.margin)}.", comparison
        )
    worst = max(not_rejected, key=lambda one: one.p_value)
    fix = f"look at the samples, or set promotion.margins.{tested.statistic}"
    reason = (
        f"{moved}: a {worst.change} of {format_number(worst.margin)} or more is not ruled out (p ="
        f" {worst.p_value:.3g}); {fix}"
    )
    return StatisticFinding(False, f"{reason}.", comparison)
