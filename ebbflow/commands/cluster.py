"""``ebbflow submit`` and ``reconcile``: runs on a Flyte cluster.

Flyte itself is used by the packages ``workflows`` and ``tasks``, which are loaded by their names.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ebbflow.commands.loading import REGISTRY, import_libraries
from ebbflow.commands.options import STORE
from ebbflow.recipe import Recipe, RecipeError, load_recipe

if TYPE_CHECKING:
    from ebbflow.tracking.reconcile import Ending

SUBMIT = "workflows.submit"
EXECUTIONS = "tasks.executions"


@click.command()
@click.argument("recipe")
@click.option("--version", help="Registered version of the pipeline; left out, the newest.")
@click.option("--project", default="flytesnacks", show_default=True, envvar="FLYTE_DEFAULT_PROJECT")
@click.option("--domain", default="development", show_default=True, envvar="FLYTE_DEFAULT_DOMAIN")
@click.option(
    "--wait", is_flag=True, help="Until it has ended; exit with status 1 unless it succeeded."
)
@click.option(
    "--overwrite-cache",
    is_flag=True,
    help="Run cached tasks again and replace what Flyte's cache points at, such as data that is"
    " gone from the bucket.",
)
def submit(
    recipe: str, version: str | None, project: str, domain: str, wait: bool, overwrite_cache: bool
) -> None:
    """Start a registered version of the pipeline on a Flyte cluster with RECIPE.

    RECIPE is a YAML file of this machine, or the name of a recipe that comes with Ebbflow, or a URI
    that pods can read. Flyte's address is that of flytekit: ~/.flyte/config.yaml, FLYTECTL_CONFIG
    or FLYTE_PLATFORM_URL. The code is that of the version; `pyflyte run --remote` runs yours
    (docs/flyte.md).
    """
    from ebbflow.extras import require
    from ebbflow.launch import SubmitError

    require("ebbflow submit", "flytekit")
    module = importlib.import_module(SUBMIT)
    try:
        target = module.Target(project, domain, version)
        succeeded = module.submit(recipe, target, wait, click.echo, overwrite_cache)
    except (RecipeError, SubmitError) as error:
        sys.exit(str(error))
    sys.exit(0 if succeeded else 1)


@click.command()
@STORE
def reconcile(recipe: Path | None) -> None:
    """Set the status of runs that MLflow shows as RUNNING although they are over.

    They were killed on this machine, or aborted or failed in Flyte, which is asked. A run starts
    with the same for its own experiment; this command takes all experiments of the store.
    """
    with import_libraries(REGISTRY):
        from ebbflow.tracking.reconcile import end_dead_runs  # imports MLflow
        from ebbflow.tracking.store import TrackingError, connect_to_store, resolve_tracking_uri

    unanswered: list[str] = []

    def ask_flyte(execution: str) -> Ending | None:
        # Once is enough to know that Flyte does not answer, which takes its time.
        if unanswered:
            unanswered.append(execution)
            return None
        try:
            ending: Ending | None = importlib.import_module(EXECUTIONS).find_ending(execution)
        except Exception as error:
            unanswered.append(execution)
            click.echo(f"Flyte does not answer: {error}", err=True)
            return None
        return ending

    try:
        settings = load_recipe(recipe) if recipe else Recipe()
        client = connect_to_store(resolve_tracking_uri(settings))
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        ended = end_dead_runs(client, experiments, ask_flyte)
    except (RecipeError, TrackingError) as error:
        sys.exit(str(error))
    for run, ending in ended:
        click.echo(f"{run.info.run_name}: {ending.status} ({ending.reason})")
    if unanswered:
        sys.exit(f"left alone, as Flyte did not answer: {', '.join(unanswered)}")
    if not ended:
        click.echo("no run to reconcile")
