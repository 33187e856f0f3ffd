"""Set the status of a run in MLflow when its workflow fails, wherever it failed: in a task, in a
pod that Flyte could not start, by a deadline.
"""

from __future__ import annotations

import logging

from flytekit import current_context, task
from flytekit.types.error.error import FlyteError

from ebbflow.recipe import Recipe
from ebbflow.recipe.secrets import redact_secrets
from tasks.resources import light_resources

SHOWN_CHARACTERS = 500

logger = logging.getLogger(__name__)


@task(**light_resources())
def end_failed_run(recipe: Recipe, err: FlyteError | None = None) -> str:
    """Set the MLflow run of this execution FAILED, with its nodes; return its id, empty where it
    has none, or where MLflow does not answer.
    """
    from ebbflow.tracking.parent_run import find_execution_run
    from ebbflow.tracking.reconcile import Ending, end_run

    execution = current_context().execution_id
    # A local run ends in its own process, which says so itself.
    if execution is None or execution.name == "local":
        return ""
    name = f"{execution.project}/{execution.domain}/{execution.name}"
    reason = redact_secrets(f"Flyte: {err.message if err else 'unknown error'}")
    try:
        tracked = find_execution_run(recipe, name)
        # Without a run the execution failed before it opened one.
        if tracked is None:
            return ""
        client, run = tracked
        end_run(client, run, Ending("FAILED", reason[:SHOWN_CHARACTERS]))
    except Exception as error:
        # Flyte would show this error in place of the one that the workflow failed by.
        logger.warning("cannot set the run FAILED in MLflow: %s", redact_secrets(str(error)))
        return ""
    return str(run.info.run_id)
