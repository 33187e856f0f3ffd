"""The end of a run for the terminal: the verdict, and where everything is."""

from __future__ import annotations

import shlex
from pathlib import Path

from ebbflow.data.records import GateDecision, Registration, TrackedRun
from ebbflow.evaluation.gate import REFUSED
from ebbflow.formatting import format_difference, format_number
from ebbflow.recipe import Recipe
from ebbflow.recipe.secrets import redact_secrets
from ebbflow.registry.serving import how_to_load
from ebbflow.tracking.store import resolve_tracking_uri
from ebbflow.tracking.ui import MODE

UI = "http://127.0.0.1:5000"
"""Where ``ebbflow ui`` serves."""


def describe_outcome(
    recipe: Recipe,
    run: TrackedRun,
    decision: GateDecision,
    registration: Registration,
    *,
    policy: str,
    base: str,
    example: str,
) -> str:
    """Describe the end of a run, which a person reads last: the verdict, and where everything is.

    Args:
        policy: path or URI of the candidate's policy folder.
        base: the same of the run's base model.
        example: a prompt, or the text to draw, for the command that draws a picture.
    """
    places = {
        "report": f"{run.folder}/report.html",
        "policy": policy,
        "base": base,
        "MLflow": _describe_ui(run),
        "load": how_to_load(run.tracking_uri, registration.model_name, registration.version),
        "draw": _describe_draw_command(run, registration, example),
    }
    return "\n".join(
        [
            *_describe_verdict(recipe, decision, registration),
            "",
            *(f"{name:8}{place}" for name, place in places.items()),
        ]
    )


def _describe_verdict(
    recipe: Recipe, decision: GateDecision, registration: Registration
) -> list[str]:
    """Describe what became of the candidate; how its reward compares with the champion's; why it
    was refused, if it was.
    """
    model = f"{registration.model_name} version {registration.version} ({decision.candidate})"
    target = decision.target
    if registration.champion:
        replaced = f" and replaces version {registration.previous}" if registration.previous else ""
        outcome = f"PROMOTED: {model} is champion{replaced}"
    elif registration.declined:
        outcome = f"NOT APPROVED: {model} stays challenger"
    elif decision.promote and recipe.promotion.approval is not None:
        outcome = f"WAITS FOR APPROVAL: {model} is challenger"
    else:
        outcome = f"NOT PROMOTED: {model} is challenger"
    comparison = (
        f"reward {format_number(target.champion)} -> {format_number(target.candidate)},"
        f" {format_difference(target.difference)} with {recipe.evaluation.confidence:.0%} interval"
        f" [{format_difference(target.low)}, {format_difference(target.high)}] over"
        f" {target.prompts} prompts, against {decision.champion}"
    )
    return [
        outcome,
        comparison,
        # The other reasons say what the gate accepted, and are in the report.
        *(reason for reason in decision.reasons if reason.startswith(REFUSED)),
    ]


def _describe_ui(run: TrackedRun) -> str:
    """Describe where the run is in MLflow: its address, and of a store without a server also the
    command that serves it.
    """
    # The part after # is a route of MLflow's page, the same for a server and for `ebbflow ui`.
    page = f"#/experiments/{run.experiment_id}/runs/{run.run_id}?{MODE}"
    if run.tracking_uri.startswith(("http://", "https://")):
        # An address may carry a password, and a terminal's output is often shared.
        return redact_secrets(f"{run.tracking_uri.rstrip('/')}/{page}")
    return f"{_prefix_store_variable(run)}ebbflow ui, then {UI}/{page}"


def _describe_draw_command(run: TrackedRun, registration: Registration, example: str) -> str:
    alias = "champion" if registration.champion else "challenger"
    return _prefix_store_variable(run) + shlex.join(
        ["ebbflow", "draw", f"{registration.model_name}@{alias}", example, "--out", "pictures"]
    )


def _prefix_store_variable(run: TrackedRun) -> str:
    """Write what stands before a command: where the store is, unless the command finds it."""
    # Commands without --recipe look where an empty recipe does.
    if run.tracking_uri == resolve_tracking_uri(Recipe()):
        return ""
    return f"MLFLOW_TRACKING_URI={shlex.quote(redact_secrets(run.tracking_uri))} "


def read_example_prompt(samples: Path) -> str:
    """Read what to draw: the text that the first held-out prompt names, or else the prompt."""
    import pyarrow.parquet as pq

    # Three columns of the file: its pictures can be gigabytes.
    rows = pq.read_table(samples, columns=["split", "prompt", "target"]).to_pylist()
    first = next(row for row in rows if row["split"] == "held_out")
    return str(first["target"] or first["prompt"])
