"""Ask a person whether a policy may become champion, and say how to answer."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from pathlib import PurePath
from typing import NamedTuple

from flytekit import current_context, task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import GateDecision, Registration, TrackedRun
from ebbflow.recipe import Recipe
from tasks.resources import light_resources

GATE = "promotion"
"""Name of the gate node that waits for the answer, and id of its signal."""


logger = logging.getLogger(__name__)


class ApprovalRequest(NamedTuple):
    """What a person is asked, and since when."""

    question: str
    asked_at: datetime


class ApprovalError(Exception):
    """There is nobody to ask."""


@task(**light_resources())
def request_approval(
    recipe: Recipe,
    run: TrackedRun,
    decision: GateDecision,
    registration: Registration,
    report: FlyteFile,
) -> ApprovalRequest:
    """Ask the gate node's question. ``report`` is an input so that it is written before a person
    has to decide.
    """
    from ebbflow.alerts import send_alert
    from ebbflow.tracking.child_run import open_node_run

    target = decision.target
    execution = current_context().execution_id
    is_remote = execution is not None and execution.name != "local"
    address = f"{run.folder}/report.html"
    # The console cuts a long line, and an object store's address is long.
    place = f"Flyte Deck of write_report, run {PurePath(run.folder).name}" if is_remote else address
    question = (
        f"{registration.model_name} version {registration.version} as champion ({target.metric}"
        f" {target.champion:.3f} -> {target.candidate:.3f}; {place})"
    )
    with open_node_run(run, "approval") as run_logger:
        params = {"question": question, "report": address, "hours": recipe.promotion.approval}
        run_logger.log_params(params)
        if execution is not None and is_remote:
            where = f"project={execution.project!r}, domain={execution.domain!r}"
            call = f"FlyteRemote.set_input({GATE!r}, {execution.name!r}, True, {where})"
            logger.warning(
                "%s: answer true or false at node %r of execution %s in Flyte's console, or call %s"
                " (False: not approved)",
                question,
                GATE,
                execution.name,
                call,
            )
            send_alert(
                f"{question}: approve it within {recipe.promotion.approval:g} hours, at node"
                f" {GATE} of execution {execution.name} in Flyte's console; report: {address}"
            )
        elif not sys.stdin.isatty():
            # In a local run flytekit prompts on stdin, and would take a line from a pipe for the
            # answer.
            raise ApprovalError(
                f"promotion.approval = {recipe.promotion.approval}, but there is no terminal to ask"
                f" on: version {registration.version} of {registration.model_name!r} stays"
                " challenger. Run the recipe again in a terminal (it resumes here), or remove"
                " promotion.approval"
            )
        else:
            # flytekit's prompt names the node and not what is asked.
            logger.warning("%s: yes or no?", question)
    return ApprovalRequest(question, datetime.now(UTC))
