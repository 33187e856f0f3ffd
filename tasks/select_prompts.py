"""Select the prompts of a branch: those of its sets, with a split of their own."""

from __future__ import annotations

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact, make_node_output
from tasks.resources import light_resources


@task(cache=ONCE_PER_RUN, **light_resources())
def select_prompts(
    recipe: Recipe, run: TrackedRun, prompts: FlyteFile, round: int, branch: str
) -> FlyteFile:
    """Write the prompt table of a branch (schema ``PROMPTS``), without prompts that are held out of
    the run.
    """
    from ebbflow.data.prepare import select_branch_prompts
    from ebbflow.data.prompts import write_prompts
    from ebbflow.data.schema import PROMPTS
    from ebbflow.storage.tables import read_table
    from ebbflow.tracking.child_run import open_node_run

    node = recipe.branch_label(round, branch)
    with open_node_run(run, f"{node} prompts") as run_logger:
        table = select_branch_prompts(recipe, read_table(fetch_artifact(prompts), PROMPTS), branch)
        run_logger.log_dataset("prompts", table, context="training", source=branch)
        path = make_node_output(run, node, "branch_prompts.parquet")
        write_prompts(table, path)
    return FlyteFile(str(path))
