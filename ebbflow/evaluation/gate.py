"""The gate: it decides whether the candidate replaces the champion. Every rule gives its reason,
whether it passes or fails.

1. Number: both sides scored at least ``MIN_PROMPTS`` held-out prompts.
2. Coverage: both sides scored all held-out samples.
3. Target: the test of "the reward did not rise" (``mean_test``) rejects at what the look may spend
   of the registered model's error budget (``look``), also if a prompt that was not seen may fall
   as far as scores can.
4. Guardrails: every guardrail metric provably fell by less than its tolerance (a share of the
   spread of the champion's prompts, unless the recipe states it on the metric's own scale), failed
   on no more than the allowed share of the samples of a side, and no more often on the candidate
   than on the champion.
5. Anchor: the reward and the guardrails provably lie less than the cumulative tolerance below the
   last version that a person approved, or the base model. Many small falls, each within its
   tolerance, add up.
6. Statistics: every image statistic provably moved by less than its margin
   (``ebbflow.evaluation.non_inferiority``).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ebbflow.data.records import Comparison, Evaluation, GateDecision, Look
from ebbflow.data.schema import KEY
from ebbflow.data.twins import digest_held_out
from ebbflow.evaluation.look import compute_lowest_reward
from ebbflow.evaluation.non_inferiority import StatisticFinding, check_statistics
from ebbflow.evaluation.statistics import (
    average_over_prompts,
    compare_metric,
    compute_disaster_p_values,
    compute_fall_p_values,
    compute_gain_p_values,
    pair_held_out_samples,
)
from ebbflow.evaluation.tolerance import compute_anchor_tolerance, compute_tolerance
from ebbflow.formatting import format_difference, format_number
from ebbflow.recipe import Recipe
from ebbflow.recipe.guardrails import MIN_PROMPTS
from ebbflow.recipe.rewards import RewardConfig
from ebbflow.rewards.base import NO_TARGET

TARGET = "reward"
REFUSED = "Refused: "
"""How the reason of a failed rule begins."""
logger = logging.getLogger(__name__)


class _Finding(NamedTuple):
    """What one rule says, as a sentence for people."""

    passed: bool
    reason: str


class Anchor(NamedTuple):
    """What the candidate is compared with besides the champion.

    Attributes:
        label: such as ``version 3, which a person approved``.
        samples: of its evaluation on the same held-out prompts and noise.
    """

    label: str
    samples: pa.Table


def decide_by_gate(
    recipe: Recipe,
    candidate: Evaluation,
    champion: Evaluation,
    candidate_samples: pa.Table,
    champion_samples: pa.Table,
    *,
    look: Look | None = None,
    anchor: Anchor | None = None,
    promoted_reward: float | None = None,
) -> GateDecision:
    """Compare a candidate with the champion by the recipe's rules.

    Args:
        recipe: guardrails, tolerances and confidence.
        candidate, champion: evaluations on the same held-out prompts and noise.
        candidate_samples, champion_samples: the samples behind them (``evaluation_schema``).
        look: what the decision may spend of the error budget; None for a branch, which decides at
            ``evaluation.confidence``.
        anchor: None where it is the champion itself.
        promoted_reward: the champion's reward in the look that promoted it.

    Raises:
        ValueError: fewer than two held-out prompts have a reward on both sides.
    """
    # All rules are checked even where the first fails: a person reads all reasons at once.
    lowest = compute_lowest_reward(recipe, candidate_samples.column_names)
    error = look.error if look else (1 - recipe.evaluation.confidence) / 2
    target = _compare_target(recipe, candidate_samples, champion_samples, lowest)
    coverage, covered = _compute_coverage(candidate, champion, candidate_samples, champion_samples)
    guardrails, guarded = _check_guardrails(recipe, candidate_samples, champion_samples)
    anchored, tied = _check_anchor(recipe, candidate_samples, anchor)
    tested = check_statistics(recipe, candidate_samples, champion_samples)
    findings = [
        *_check_number_of_prompts(target),
        covered,
        _check_target(recipe, target, look, promoted_reward),
        _check_disasters(target, error, lowest),
        *guarded,
        *tied,
        *_check_statistics(tested),
    ]
    decision = GateDecision(
        promote=all(finding.passed for finding in findings),
        candidate=candidate.label,
        champion=champion.label,
        target=target,
        guardrails=guardrails,
        statistics=[finding.comparison for finding in tested if finding.comparison],
        look=look,
        anchor=anchor.label if anchor else None,
        anchored=anchored,
        promoted_reward=promoted_reward,
        coverage=coverage,
        held_out_digest=digest_held_out(candidate_samples),
        reward_weights=candidate.reward_weights,
        reasons=_list_reasons(findings),
    )
    _log_decision(decision)
    return decision


def _list_reasons(findings: Sequence[_Finding]) -> list[str]:
    return [finding.reason if finding.passed else REFUSED + finding.reason for finding in findings]


def _log_decision(decision: GateDecision) -> None:
    verdict = "promote" if decision.promote else "do not promote"
    logger.info("gate: %s %s over %s", verdict, decision.candidate, decision.champion)
    for reason in decision.reasons:
        logger.info("gate: %s", reason)


def _compare_target(
    recipe: Recipe, candidate: pa.Table, champion: pa.Table, lowest: float | None
) -> Comparison:
    """Compare the reward, and test whether it rose."""
    means = average_over_prompts(TARGET, candidate, champion)
    sides = means["candidate"].to_numpy(), means["champion"].to_numpy()
    p_values = {
        "p_value": float(compute_gain_p_values(*sides)),
        "disaster_p_value": float(compute_disaster_p_values(*sides, lowest)),
    }
    comparison = compare_metric(
        TARGET, candidate, champion, confidence=recipe.evaluation.confidence
    )
    return comparison.model_copy(update=p_values)


def _check_number_of_prompts(target: Comparison) -> list[_Finding]:
    """Check that there are enough prompts for the tests to hold; no finding where there are."""
    if target.prompts >= MIN_PROMPTS:
        return []
    reason = (
        f"Too few held-out prompts to decide on: both sides scored {target.prompts}, and the tests"
        f" hold for {MIN_PROMPTS} and more; raise prompts.held_out (for the gate of a branch,"
        " prompts.validation)."
    )
    return [_Finding(False, reason)]


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


def _check_target(
    recipe: Recipe, target: Comparison, look: Look | None, promoted_reward: float | None
) -> _Finding:
    """Check that the reward provably rose, at the error that the look may spend."""
    error = look.error if look else (1 - recipe.evaluation.confidence) / 2
    p_value = 1.0 if target.p_value is None else target.p_value
    passed = p_value < error
    proof = "below" if passed else "not below"
    share = f"{proof} {format_number(error)}"
    if look:
        share += (
            f", the share of look {look.number} in the error budget of the model (spent with it:"
            f" {format_number(look.spent)} of {look.budget:g} in 365 days)"
        )
    sentences = [
        f"The reward went {_describe_change(target)}; p = {format_number(p_value)} over"
        f" {target.prompts} prompts, {share}: {'a' if passed else 'no'} proven gain."
    ]
    looks_per_year = recipe.promotion.looks_per_year
    even_share = recipe.promotion.error_budget / looks_per_year
    # The last of the year's looks has half of what is left, and the ones after it less and less.
    is_spent = look is not None and look.spent - look.error > look.budget - 0.75 * even_share
    if not passed and is_spent:
        sentences.append(
            f"The error budget is spent: promotion.looks_per_year = {looks_per_year} runs or more"
            " looked in 365 days, and the oldest looks have to become older than that. Until then a"
            " person can promote a version with `ebbflow rollback RECIPE --to VERSION`, or raise"
            " promotion.error_budget with `ebbflow gate-policy RECIPE --set --reason ...`; set"
            " looks_per_year to the number of runs that you start in a year."
        )
    if promoted_reward is not None:
        luck = promoted_reward - target.champion
        sentences.append(
            f"The champion scored {format_number(promoted_reward)} in the look that promoted it,"
            f" {format_difference(luck)} to its new samples: the luck of having been chosen."
        )
    return _Finding(passed, " ".join(sentences))


def _check_disasters(target: Comparison, error: float, lowest: float | None) -> _Finding:
    """Check that the gain does not rest on the luck of prompts without a disaster."""
    p_value = 1.0 if target.disaster_p_value is None else target.disaster_p_value
    passed = p_value < error
    fall = f"to {format_number(lowest)}" if lowest is not None else "by the range of all scores"
    if passed:
        verdict = f"the gain would hold (p = {format_number(p_value)})."
    else:
        verdict = (
            f"the gain would not be proven (p = {format_number(p_value)}, needed:"
            f" {format_number(error)}); more held-out prompts can show it, or rewards.lowest where"
            " that is higher."
        )
    return _Finding(passed, f"If the score of a prompt that was not seen fell {fall}, {verdict}")


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

        # Nobody asked for a default guardrail that cannot run here or finds nothing to read: the
        # run has warned. One that the recipe names is a condition that was not met, and so is one
        # of the model's gate policy (``pinned_policy``).
        if not on_candidate and not on_champion:
            missing = f"Guardrail {guardrail} was measured on neither side (not installed, or"
            if recipe.has_default_guardrails:
                reason = f"{missing} nothing to read); the recipe does not name it."
            else:
                reason = f"{missing} nothing to read); install it, or remove it from the recipe."
            findings.append(_Finding(recipe.has_default_guardrails, reason))
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

        tolerance, unit = compute_tolerance(recipe, guardrail, candidate, champion)
        comparison = _compare_fall(recipe, guardrail, candidate, champion, tolerance)
        comparisons.append(comparison)
        findings.append(_judge_fall(recipe, f"Guardrail {guardrail}", comparison, unit))
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
    scored = asked[np.isfinite(asked[["candidate", "champion"]]).all(axis=1)]
    common = scored["prompt_id"].nunique()
    if common < MIN_PROMPTS:
        return (
            f"Guardrail {metric} scored {common} held-out prompts on both sides, too few to rule a"
            f" fall out ({MIN_PROMPTS} are needed)"
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


def _compare_fall(
    recipe: Recipe, metric: str, candidate: pa.Table, champion: pa.Table, tolerance: float
) -> Comparison:
    """Compare a metric, and test whether its mean fell by the tolerance or more."""
    means = average_over_prompts(metric, candidate, champion)
    p_value = compute_fall_p_values(
        means["candidate"].to_numpy(), means["champion"].to_numpy(), np.asarray(tolerance)
    )
    comparison = compare_metric(
        metric, candidate, champion, confidence=recipe.evaluation.confidence
    )
    return comparison.model_copy(update={"tolerance": tolerance, "p_value": float(p_value)})


def _judge_fall(recipe: Recipe, name: str, comparison: Comparison, unit: str) -> _Finding:
    """Check that a metric provably fell by less than its tolerance.

    Each at the full error: a candidate passes only if all of its tests reject (an
    intersection-union test: Berger, Technometrics 24, 1982), so more of them need no correction.
    """
    error = (1 - recipe.evaluation.confidence) / 2
    p_value = 1.0 if comparison.p_value is None else comparison.p_value
    passed = p_value < error
    ruled_out = "is ruled out" if passed else "is not ruled out"
    reason = (
        f"{name} went {_describe_change(comparison)} over {comparison.prompts} prompts; a fall of"
        f" {unit} or more {ruled_out} (p = {format_number(p_value)}, needed: {error:g})."
    )
    return _Finding(passed, reason)


def _check_anchor(
    recipe: Recipe, candidate: pa.Table, anchor: Anchor | None
) -> tuple[list[Comparison], list[_Finding]]:
    """Compare the reward and every guardrail with the anchor, and judge how far they fell in all.

    A guardrail that the anchor or the candidate lacks is judged against the champion alone.
    """
    share = recipe.promotion.anchor_tolerance
    if anchor is None or share is None:
        return [], []
    comparisons = []
    findings = []
    columns: dict[str, RewardConfig | None] = {TARGET: None}
    columns |= {config.column: config for config in recipe.guardrails}
    for metric, config in columns.items():
        if metric not in candidate.column_names or metric not in anchor.samples.column_names:
            continue
        sides = (candidate, anchor.samples)
        if config is not None:
            sides = (_select_rows(config, candidate), _select_rows(config, anchor.samples))
        name = "The reward" if metric == TARGET else f"Guardrail {metric}"
        name = f"{name} against the anchor, {anchor.label},"
        pairs = pair_held_out_samples(metric, *sides)
        scored = pairs[np.isfinite(pairs[["candidate", "champion"]]).all(axis=1)]
        common = scored["prompt_id"].nunique()
        if common < MIN_PROMPTS:
            reason = (
                f"{name} was scored on {common} held-out prompts of both, too few to rule a fall"
                f" out ({MIN_PROMPTS} are needed); see the column 'failure' of the samples."
            )
            findings.append(_Finding(False, reason))
            continue
        tolerance, unit = compute_anchor_tolerance(recipe, metric, share, *sides)
        comparison = _compare_fall(recipe, metric, *sides, tolerance)
        comparisons.append(comparison)
        finding = _judge_fall(recipe, name, comparison, unit)
        if not finding.passed:
            reason = (
                f"{finding.reason} The cumulative tolerance (promotion.anchor_tolerance) is used"
                " up: look at the pictures of both; `ebbflow rollback RECIPE --to VERSION` makes a"
                " version champion and the new anchor."
            )
            finding = _Finding(False, reason)
        findings.append(finding)
    return comparisons, findings


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
