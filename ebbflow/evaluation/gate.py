"""The gate: it decides whether the candidate replaces the champion. Every rule gives its reason,
whether it passes or fails.

1. Coverage: both sides scored all held-out samples.
2. Target: the confidence interval of the reward's paired difference lies above zero.
3. Guardrails: no guardrail metric fell by more than its tolerance (a share of the spread of the
   champion's prompts, unless the recipe states it on the metric's own scale), failed on more than
   the allowed share of the samples of a side, or failed more often on the candidate than on the
   champion.
4. Statistics: every image statistic provably moved by less than its margin
   (``ebbflow.evaluation.non_inferiority``).
"""

from __future__ import annotations

import logging
import re
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ebbflow.data.records import Comparison, Evaluation, GateDecision
from ebbflow.data.schema import KEY
from ebbflow.evaluation.non_inferiority import StatisticFinding, check_statistics
from ebbflow.evaluation.statistics import (
    average_over_prompts,
    compare_metric,
    pair_held_out_samples,
)
from ebbflow.formatting import format_difference, format_number
from ebbflow.recipe import Recipe
from ebbflow.recipe.rewards import RewardConfig
from ebbflow.rewards.base import NO_TARGET

TARGET = "reward"
REFUSED = "Refused: "
"""How the reason of a failed rule begins."""
ROUNDING = 1e-9
"""Slack in floating point, so that a fall of exactly the tolerance is allowed."""

logger = logging.getLogger(__name__)


class _Finding(NamedTuple):
    """What one rule says, as a sentence for people."""

    passed: bool
    reason: str


def decide_by_gate(
    recipe: Recipe,
    candidate: Evaluation,
    champion: Evaluation,
    candidate_samples: pa.Table,
    champion_samples: pa.Table,
) -> GateDecision:
    """Compare a candidate with the champion by the recipe's rules.

    Args:
        recipe: guardrails, tolerance, confidence, resamples and the seed of the bootstrap.
        candidate, champion: evaluations on the same held-out prompts and noise.
        candidate_samples, champion_samples: the samples behind them (``evaluation_schema``).

    Raises:
        ValueError: fewer than two held-out prompts have a reward on both sides.
    """
    # All rules are checked even where the first fails: a person reads all reasons at once.
    target = _compare_metric(recipe, TARGET, candidate_samples, champion_samples)
    coverage, covered = _compute_coverage(candidate, champion, candidate_samples, champion_samples)
    guardrails, guarded = _check_guardrails(recipe, candidate_samples, champion_samples)
    tested = check_statistics(recipe, candidate_samples, champion_samples)
    findings = [covered, _check_target(recipe, target), *guarded, *_check_statistics(tested)]
    decision = GateDecision(
        promote=all(finding.passed for finding in findings),
        candidate=candidate.label,
        champion=champion.label,
        target=target,
        guardrails=guardrails,
        statistics=[finding.comparison for finding in tested if finding.comparison],
        coverage=coverage,
        reasons=[
            finding.reason if finding.passed else REFUSED + finding.reason for finding in findings
        ],
    )
    logger.info(
        "gate: %s %s over %s",
        "promote" if decision.promote else "do not promote",
        decision.candidate,
        decision.champion,
    )
    for reason in decision.reasons:
        logger.info("gate: %s", reason)
    return decision


def _compare_metric(
    recipe: Recipe, metric: str, candidate: pa.Table, champion: pa.Table
) -> Comparison:
    """Compare a metric with the recipe's resamples, confidence and seed."""
    rule = recipe.evaluation
    return compare_metric(
        metric,
        candidate,
        champion,
        resamples=rule.resamples,
        confidence=rule.confidence,
        seed=recipe.seed,
    )


def _compute_coverage(
    candidate: Evaluation,
    champion: Evaluation,
    candidate_samples: pa.Table,
    champion_samples: pa.Table,
) -> tuple[float, _Finding]:
    """Compute the share of the held-out samples with a finite reward on both sides.

    The evaluations' own coverage counts too: a prompt that is missing from both tables leaves no
    trace in them.
    """
    pairs = pair_held_out_samples(TARGET, candidate_samples, champion_samples)
    both = int(np.isfinite(pairs[["candidate", "champion"]]).all(axis=1).sum())
    coverage = min(both / len(pairs), candidate.coverage, champion.coverage)
    # Exactly 1: shares of counts have no rounding there. A sample without a reward may be the one
    # that the policy broke, so full coverage is asked for.
    if coverage == 1.0:
        return coverage, _Finding(
            True, f"Coverage is full: both sides scored all {both} held-out samples."
        )
    missing = {side: int((~np.isfinite(pairs[side])).sum()) for side in ("candidate", "champion")}
    return coverage, _Finding(
        False,
        f"Coverage is {coverage:.1%}, not full: of {len(pairs)} held-out samples the candidate has"
        f" no reward for {missing['candidate']} and the champion for {missing['champion']} (their"
        f" evaluations cover {candidate.coverage:.1%} and {champion.coverage:.1%} of the prompts).",
    )


def _check_target(recipe: Recipe, target: Comparison) -> _Finding:
    """Check that the reward's interval lies above zero."""
    interval = (
        f"{recipe.evaluation.confidence:.0%} interval [{format_difference(target.low)},"
        f" {format_difference(target.high)}]"
    )
    moved = f"The reward went {_describe_change(target)}"
    if target.low > 0:
        return _Finding(
            True, f"{moved}; its {interval} over {target.prompts} prompts lies above zero."
        )
    return _Finding(
        False,
        f"{moved}; its {interval} over {target.prompts} prompts does not lie above zero: no proven"
        " gain.",
    )


def _check_guardrails(
    recipe: Recipe, candidate_samples: pa.Table, champion_samples: pa.Table
) -> tuple[list[Comparison], list[_Finding]]:
    """Compare every guardrail that both sides have, and judge it."""
    # A recipe may do without any, as that of a pretrained family does by default. A reader of the
    # reasons should not take it for one whose guardrails held.
    if not recipe.guardrails:
        reason = (
            "No guardrails are named: only the reward and the statistics of the images are"
            " compared."
        )
        return [], [_Finding(True, reason)]
    comparisons: list[Comparison] = []
    findings: list[_Finding] = []
    for config in recipe.guardrails:
        guardrail = config.column
        candidate = _select_rows(config, candidate_samples)
        champion = _select_rows(config, champion_samples)
        on_candidate = guardrail in candidate.column_names
        on_champion = guardrail in champion.column_names

        # A guardrail whose library is not installed is missing on both sides: the run has warned.
        # So is a default one that finds no text to read in the prompts: ``check`` has said so.
        if not on_candidate and not on_champion:
            reason = (
                f"Guardrail {guardrail} was measured on neither side (not installed, or nothing to"
                " read): ignored."
            )
            findings.append(_Finding(True, reason))
            continue

        # On one side alone there is nothing to compare, and a candidate must not pass by that.
        if on_candidate != on_champion:
            present = "candidate" if on_candidate else "champion"
            absent = "champion" if on_candidate else "candidate"
            reason = f"Guardrail {guardrail} was measured on the {present} but not on the {absent}"
            findings.append(_Finding(False, f"{reason}; evaluate both with it."))
            continue

        # Failures hide samples from the means that are compared below, so they are judged first.
        failures = _explain_failures(recipe, guardrail, candidate, champion)
        if failures:
            reason = f"{failures}; see the column 'failure' of the samples."
            findings.append(_Finding(False, reason))
            continue

        comparison, finding = _check_guardrail(recipe, guardrail, candidate, champion)
        comparisons.append(comparison)
        findings.append(finding)
    return comparisons, findings


def _select_rows(config: RewardConfig, samples: pa.Table) -> pa.Table:
    """Select the samples of the prompts that a guardrail scores."""
    if not config.prompts:
        return samples
    return samples.filter(pc.is_in(samples["source"], pa.array(config.prompts)))


def _explain_failures(
    recipe: Recipe, metric: str, candidate: pa.Table, champion: pa.Table
) -> str | None:
    """Explain why a metric's failures keep the candidate back, or return None.

    A failure hides a sample from the mean. A few are allowed, but not more of the candidate's: it
    may have learnt to cause them.
    """
    # A prompt that names no text has no OCR score on either side, which is no failure.
    pairs = pair_held_out_samples(metric, candidate, champion)
    excused = _list_keys_without_text(metric, candidate) & _list_keys_without_text(metric, champion)
    asked = pairs[[key not in excused for key in pairs[KEY].itertuples(index=False, name=None)]]
    candidate_failures = int((~np.isfinite(asked["candidate"])).sum())
    champion_failures = int((~np.isfinite(asked["champion"])).sum())
    failed = (
        f"Guardrail {metric} failed on {candidate_failures} of {len(asked)} held-out samples of the"
        f" candidate and on {champion_failures} of the champion"
    )
    if max(candidate_failures, champion_failures) > recipe.max_failed_share * len(asked):
        return f"{failed}, more than max_failed_share = {recipe.max_failed_share:.1%} allows"
    if candidate_failures > champion_failures:
        return f"{failed}: it fails more often on the candidate"
    # The interval needs two prompts (compute_paired_bootstrap).
    scored = asked[np.isfinite(asked[["candidate", "champion"]]).all(axis=1)]
    common = scored["prompt_id"].nunique()
    if common < 2:
        return (
            f"Guardrail {metric} scored {common} held-out prompts on both sides, too few to compare"
        )
    return None


def _list_keys_without_text(metric: str, samples: pa.Table) -> set[tuple[int, int]]:
    """List the keys of the samples on which a metric that reads has no value because their prompt
    names no text.
    """
    # The column "failure" joins the failures of all metrics: "ocr: no target; clip: ...", and for a
    # video "ocr: frame 3: no target". Only this metric's own counts.
    says_so = re.compile(rf"(^|; ){re.escape(metric)}: (frame \d+: )?{re.escape(NO_TARGET)}")
    rows = samples.select([*KEY, "target", "failure", metric]).to_pylist()
    silent = (row for row in rows if row["target"] is None and row[metric] is None)
    return {(row[KEY[0]], row[KEY[1]]) for row in silent if says_so.search(row["failure"] or "")}


def _check_guardrail(
    recipe: Recipe, metric: str, candidate: pa.Table, champion: pa.Table
) -> tuple[Comparison, _Finding]:
    """Check that a guardrail's mean did not fall by more than its tolerance."""
    tolerance, unit = _compute_tolerance(recipe, metric, candidate, champion)
    guardrail = _compare_metric(recipe, metric, candidate, champion).model_copy(
        update={"tolerance": tolerance}
    )
    # The mean and not the interval: a guardrail is no proof of harmlessness, and with few prompts
    # an interval would refuse every candidate.
    passed = guardrail.difference >= -tolerance - ROUNDING * max(1.0, tolerance)
    place = "within" if passed else "beyond"
    reason = (
        f"Guardrail {metric} went {_describe_change(guardrail)} over {guardrail.prompts} prompts,"
        f" {place} the allowed fall of {unit}."
    )
    return guardrail, _Finding(passed, reason)


def _compute_tolerance(
    recipe: Recipe, metric: str, candidate: pa.Table, champion: pa.Table
) -> tuple[float, str]:
    """Compute how far a guardrail may fall on the scale of its scores, and how a reason says so."""
    rule = recipe.promotion.guardrail_tolerance
    absolute = rule.absolute.get(metric)
    if absolute is not None:
        return absolute, format_number(absolute)
    # In standard deviations of the champion's prompts, since guardrails have many scales: a cosine,
    # a logit, a share of exact readings.
    share = rule.standard_deviations.get(metric, rule.default)
    spread = float(average_over_prompts(metric, candidate, champion)["champion"].std())
    if spread <= ROUNDING:
        reason = (
            "0 (the champion's prompts all score the same;"
            " promotion.guardrail_tolerance.absolute can state more)"
        )
        return 0.0, reason
    tolerance = share * spread
    reason = f"{format_number(tolerance)} ({share:g} standard deviations of the champion's prompts)"
    return tolerance, reason


def _describe_change(one: Comparison) -> str:
    return (
        f"from {format_number(one.champion)} to {format_number(one.candidate)}"
        f" ({format_difference(one.difference)})"
    )


def _check_statistics(tested: list[StatisticFinding]) -> list[_Finding]:
    """Return a finding for each statistic that keeps the candidate back, and one for all others
    together.
    """
    near = [finding.comparison for finding in tested if finding.passed and finding.comparison]
    findings = [_Finding(False, finding.reason) for finding in tested if not finding.passed]
    if near:
        moved = ", ".join(f"{one.metric} {format_difference(one.difference)}" for one in near)
        findings.append(_Finding(True, f"Statistics of the images within their margins: {moved}."))
    elif not tested:
        findings.append(
            _Finding(True, "No statistic of the images was measured on either side: ignored.")
        )
    return findings
