"""What a person reads of a comparison of two policies: a page, a table and a verdict."""

from __future__ import annotations

import json
from pathlib import Path

from ebbflow.comparison.policies import PolicyComparison
from ebbflow.data.records import Comparison
from ebbflow.evaluation.gate import REFUSED
from ebbflow.formatting import format_difference, format_number
from ebbflow.plots import charts
from ebbflow.report.categories import build_category_tables, keep_finite
from ebbflow.report.glossary import build_glossary
from ebbflow.report.page_environment import create_result_environment
from ebbflow.report.sides import (
    build_pictures,
    compare_by_prompt,
    list_metrics,
    name_trained_reward,
)
from ebbflow.storage.disk import write_text

PAGE = "evaluation.html"
NUMBERS = "evaluation.json"
HEADER: tuple[str, ...] = (
    "",
    "against",
    "policy",
    "difference",
    "interval",
    "allowed fall",
    "prompts",
)


def write_policy_page(comparison: PolicyComparison) -> Path:
    """Write the page, one HTML file without references to others, and its numbers as JSON; return
    the page.
    """
    after, against = comparison.candidate, comparison.champion
    evaluations = [against[0], after[0]]
    metrics = list_metrics(comparison.recipe, evaluations)
    statistics = list(dict.fromkeys(name for one in evaluations for name in one.statistics))
    decision = comparison.decision
    template = create_result_environment(Path(__file__).parent).get_template("policies.html")
    page = template.render(
        recipe=comparison.recipe,
        decision=decision,
        verdict=describe_verdict(comparison),
        gate_error=_compute_gate_error(comparison),
        evaluations=evaluations,
        metrics=metrics,
        statistics=statistics,
        trained=name_trained_reward(comparison.recipe),
        differences=charts.plot_differences(decision),
        categories=build_category_tables(against[0], after[0]),
        **build_glossary(comparison.recipe, [*metrics, decision.target.metric], statistics),
        **build_pictures([against, after], against, after, metrics),
        **compare_by_prompt(comparison.recipe, against, after),
    )
    write_text(comparison.folder / PAGE, page)
    numbers = {
        "decision": decision.model_dump(mode="json"),
        "policy": keep_finite(after[0].held_out),
        "against": keep_finite(against[0].held_out),
        "policy_digest": after[0].policy_digest,
        "against_digest": against[0].policy_digest,
        "recipe_digest": comparison.recipe.digest,
    }
    write_text(comparison.folder / NUMBERS, json.dumps(numbers, indent=2, allow_nan=False) + "\n")
    return comparison.folder / PAGE


def describe_verdict(comparison: PolicyComparison) -> str:
    """Say in a line whether the rules of the gate hold."""
    decision = comparison.decision
    confidence = f"{comparison.recipe.evaluation.confidence:.0%} confidence"
    pair = f"{decision.candidate} against {decision.champion}"
    if decision.promote:
        return f"BETTER: {pair}, at {confidence}"
    count = sum(reason.startswith(REFUSED) for reason in decision.reasons)
    rules = "a rule of the gate refuses" if count == 1 else f"{count} rules of the gate refuse"
    return f"NOT PROVEN BETTER: {pair}, at {confidence}: {rules}"


def format_comparison(comparison: PolicyComparison) -> str:
    """Format the table of the gate and why it refuses, for the terminal."""
    decision = comparison.decision
    refused = [reason for reason in decision.reasons if reason.startswith(REFUSED)]
    rows: list[tuple[str, ...]] = [
        ("", "against", "policy", "difference", "interval", "allowed fall", "prompts")
    ]
    rows += [_format_row(one) for one in (decision.target, *decision.guardrails)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], "", *refused])


def _format_row(one: Comparison) -> tuple[str, ...]:
    return (
        charts.format_metric_name(one.metric),
        format_number(one.champion),
        format_number(one.candidate),
        format_difference(one.difference),
        f"{format_difference(one.low)} to {format_difference(one.high)}",
        format_number(one.tolerance),
        str(one.prompts),
    )


def _compute_gate_error(comparison: PolicyComparison) -> float:
    """Compute the p-value that a look of the gate asks for: its share of the error budget."""
    promotion = comparison.recipe.promotion
    return promotion.error_budget / promotion.looks_per_year
