"""Checks everything that can be checked before minutes are spent, and opens the run in MLflow."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from flytekit import current_context, task

import ebbflow
from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.resources import light

_HELD = ExitStack()
"""The folder of the run that this process executes without a cluster; the system lets go of it when the process dies."""


@task(**light())
def start_run(recipe: Recipe) -> TrackedRun:
    """Open the parent run; a retry of the same execution finds it again, and so does a local run that is started again."""
    from ebbflow.preflight import check_recipe
    from ebbflow.tracking import parent_run
    from ebbflow.tracking.store import resolve_tracking_uri

    execution = current_context().execution_id
    # Every local run is called "local".
    on_cluster = execution is not None and execution.name != "local"
    name = f"{execution.project}/{execution.domain}/{execution.name}" if on_cluster else None
    check_recipe(recipe, tracking_uri=resolve_tracking_uri(recipe), on_cluster=on_cluster)
    return parent_run.start_run(recipe, name) if name else _start_here(recipe)


def _start_here(recipe: Recipe) -> TrackedRun:
    """The run of this recipe that was stopped, if code and inputs are still the same; else a new one.

    What it had finished lies in Flyte's cache, which knows it by the run, so the same run has to go on.
    """
    from ebbflow.storage.identity import code_digest, inputs_digest
    from ebbflow.storage.locks import exclusive_lock
    from ebbflow.tracking import parent_run

    here = Path(__file__).parent
    code = code_digest(Path(ebbflow.__file__).parent, here, here.parent / "workflows")
    tags = {"ebbflow.code_digest": code, "ebbflow.inputs_digest": inputs_digest(recipe)}
    stopped = parent_run.stopped_run(recipe, tags)
    run = stopped or parent_run.start_run(recipe, None, tags)
    if "://" in run.folder:
        return run
    _HELD.close()  # the run before, in a process that runs several
    _HELD.enter_context(
        exclusive_lock(Path(run.folder), f"wait until it ends, or run the recipe with another 'output' than {recipe.output!r}")
    )
    if stopped:
        print(f"going on with the run that was stopped (MLflow run {run.run_id}); to begin anew, delete {run.folder}")
        parent_run.open_run(recipe, run)
    return run
