"""How far a metric may fall below the champion, and below the anchor in all."""

from __future__ import annotations

import pyarrow as pa

from ebbflow.evaluation.statistics import average_over_prompts
from ebbflow.formatting import format_number
from ebbflow.recipe import Recipe

ROUNDING = 1e-9
"""Spread of the champion's prompts up to which they count as all the same."""


def compute_anchor_tolerance(
    recipe: Recipe, metric: str, share: float, candidate: pa.Table, anchor: pa.Table
) -> tuple[float, str]:
    """Compute how far a metric may fall below the anchor in all, and how a reason says so.

    A guardrail with a tolerance of its own may fall by as many times that as the others by theirs:
    by ``anchor_tolerance / guardrail_tolerance.default``.
    """
    rule = recipe.promotion.guardrail_tolerance
    times = share / rule.default if rule.default else 1.0
    if metric in rule.absolute:
        tolerance = times * rule.absolute[metric]
        reason = f"{format_number(tolerance)} ({times:g} times its tolerance)"
        return tolerance, reason
    if metric in rule.standard_deviations:
        share = times * rule.standard_deviations[metric]
    spread = float(average_over_prompts(metric, candidate, anchor)["champion"].std())
    tolerance = share * spread
    return tolerance, f"{format_number(tolerance)} ({share:g} standard deviations of its prompts)"


def compute_tolerance(
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
