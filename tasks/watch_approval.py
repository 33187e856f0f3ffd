"""Wait beside the gate node for a person's answer: remind them once a day, and say no in their
place when the time is up, so that a night without an answer ends as "not approved" and not as a
failure.
"""

from __future__ import annotations

import logging
import os
import time
from datetime import UTC, datetime, timedelta

from flytekit import current_context, task

from ebbflow.alerts import send_alert
from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from ebbflow.recipe.secrets import redact_secrets
from tasks import executions
from tasks.request_approval import GATE
from tasks.resources import light_resources

POLL_SECONDS = 60.0
REMIND_AFTER = timedelta(days=1)
GATE_MARGIN = timedelta(hours=1)
"""How much longer the gate waits than a person may think: a gate that runs out of time fails."""

logger = logging.getLogger(__name__)


@task(**light_resources())
def watch_approval(recipe: Recipe, run: TrackedRun, question: str, asked_at: datetime) -> str:
    """Return what was asked once it is answered, or with "nobody answered" when the time is up."""
    execution = current_context().execution_id
    assert recipe.promotion.approval
    # In a local run the terminal waits for the answer.
    if execution is None or execution.name == "local":
        return question
    if not os.environ.get(executions.ENDPOINT):
        logger.warning(
            "nobody is reminded, and without an answer the execution fails: this pod does not know"
            " Flyte's address. Add %s to env in the deployment file",
            executions.ENDPOINT,
        )
        return question
    name = f"{execution.project}/{execution.domain}/{execution.name}"
    allowed = timedelta(hours=recipe.promotion.approval)
    asked_at = find_time_of_question(name, question, asked_at, allowed)
    report = f"{run.folder}/report.html"
    return wait_for_answer(name, question, report, asked_at, asked_at + allowed)


def find_time_of_question(
    execution: str, question: str, asked_at: datetime, allowed: timedelta
) -> datetime:
    """Find since when this execution's gate waits. *Recover* makes an execution with a new gate,
    and takes over what was asked in the failed one, whose time may be up: it is asked anew.
    """
    try:
        started_at = executions.find_start(execution)
    except Exception as error:
        logger.warning("Flyte does not answer: %s", redact_secrets(str(error)))
        return asked_at
    if started_at <= asked_at:
        return asked_at
    send_alert(
        f"{question} waits for approval in {execution}, for {allowed / timedelta(hours=1):g} hours"
    )
    return started_at


def wait_for_answer(
    execution: str, question: str, report: str, asked_at: datetime, deadline: datetime
) -> str:
    """Wait until a person has answered, and say no at ``deadline``.

    Args:
        report: its address, for the reminders.
    """
    # Counted from the question, so that a pod that replaces a lost one does not begin again.
    reminders = (datetime.now(UTC) - asked_at) // REMIND_AFTER
    while True:
        try:
            if executions.is_answered(execution, GATE):
                return question
            now = datetime.now(UTC)
            # Only here: a person may have said yes while Flyte does not answer.
            if now >= deadline:
                executions.refuse(execution, GATE)
                break
            if (now - asked_at) // REMIND_AFTER > reminders:
                reminders = (now - asked_at) // REMIND_AFTER
                hours = (deadline - now) / timedelta(hours=1)
                send_alert(
                    f"{question} still waits for approval, {hours:.0f} hours more ({execution});"
                    f" report: {report}"
                )
        except Exception as error:
            # Flyte may be restarted in the days that a person has. The gate ends this, too.
            logger.warning("Flyte does not answer: %s", redact_secrets(str(error)))
        time.sleep(POLL_SECONDS)
    hours = (deadline - asked_at) / timedelta(hours=1)
    unanswered = f"{question}: nobody answered in {hours:g} hours"
    send_alert(f"{unanswered}; the champion stays")
    logger.warning("%s; it is not approved", unanswered)
    return unanswered
