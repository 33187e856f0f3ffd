"""Checks everything that can be checked before minutes are spent, and opens the run in MLflow."""

from __future__ import annotations

from flytekit import current_context, task

from ebbflow.recipe import Recipe
from ebbflow.records import TrackedRun
from tasks.resources import light


@task(**light())
def start_run(recipe: Recipe) -> TrackedRun:
    """Open the parent run; a retry of the same execution finds it again."""
    from ebbflow.preflight import check_recipe
    from ebbflow.tracking import runs

    execution = current_context().execution_id
    # Every local run is called "local": it would resume the run before it.
    name = execution.name if execution and execution.name != "local" else None
    check_recipe(recipe, tracking_uri=runs.resolve_tracking_uri(recipe), on_cluster=name is not None)
    return runs.start_run(recipe, name)
