"""The prompt table: from a file or made up, split by id."""

from __future__ import annotations

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch, scratch
from tasks.resources import light


@task(cache=ONCE_PER_RUN, **light())
def prepare_prompts(recipe: Recipe, run: TrackedRun) -> FlyteFile:
    """Write the prompt table (schema ``PROMPTS``) and log it as the run's dataset."""
    from ebbflow.data.prepare import prepare
    from ebbflow.data.prompts import write_prompts
    from ebbflow.tracking.child_run import node_run

    with node_run(run, "prompts") as node:
        source = fetch(FlyteFile(recipe.prompts.source)) if recipe.prompts.source else None
        table, report = prepare(recipe, source)
        print(report)
        node.log_dataset("prompts", table, context="training", source=recipe.prompts.source or "made up")
        path = scratch("prompts.parquet", run)
        write_prompts(table, path)
    return FlyteFile(str(path))
