"""Asks a person whether a policy may become champion: says what is asked, and how to answer."""

from __future__ import annotations

import sys

from flytekit import current_context, task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import Registration, TrackedRun, Verdict
from ebbflow.recipe import Recipe
from tasks.resources import light

GATE = "promotion"
"""The gate node that waits for the answer; its name is the signal's id."""


class ApprovalError(Exception):
    """Nobody can be asked."""


@task(**light())
def request_approval(recipe: Recipe, run: TrackedRun, verdict: Verdict, registration: Registration, report: FlyteFile) -> str:
    """What the gate node asks. The report comes first, as it is what a person decides by."""
    from ebbflow.tracking.child_run import node_run

    target = verdict.target
    question = (
        f"{registration.model_name} version {registration.version} as champion "
        f"({target.metric} {target.champion:.3f} -> {target.candidate:.3f}; {run.folder}/report.html)"
    )
    execution = current_context().execution_id
    with node_run(run, "approval") as node:
        node.log_params({"question": question, "hours": recipe.promotion.approval})
        if execution and execution.name != "local":
            where = f"project={execution.project!r}, domain={execution.domain!r}"
            print(
                f"{question}: approve it in Flyte's console, at the node {GATE!r} of execution {execution.name}, or with "
                f"FlyteRemote.approve({GATE!r}, {execution.name!r}, {where})"
            )
        elif not sys.stdin.isatty():
            # Flyte would take an empty line of whatever is piped in for a yes.
            raise ApprovalError(
                f"promotion.approval = {recipe.promotion.approval}, but there is no terminal to ask on: version "
                f"{registration.version} of {registration.model_name!r} stays challenger, and the report is written. Run the "
                "recipe again in a terminal, which goes on from here, or leave promotion.approval out"
            )
    return question
