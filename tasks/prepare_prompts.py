"""Prepare the prompt table: read from a file or generated, and split by prompt id."""

from __future__ import annotations

import logging

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact, make_node_output
from tasks.resources import light_resources

logger = logging.getLogger(__name__)


@task(cache=ONCE_PER_RUN, **light_resources())
def prepare_prompts(recipe: Recipe, run: TrackedRun) -> FlyteFile:
    """The prompt table (schema ``PROMPTS``), logged as the run's dataset."""
    from ebbflow.data.prepare import prepare_prompt_table
    from ebbflow.data.prompts import write_prompts
    from ebbflow.recipe.paths import resolve_local_path
    from ebbflow.tracking.child_run import open_node_run

    with open_node_run(run, "prompts") as run_logger:
        sources = recipe.prompts.source_files
        judged = recipe.prompts.held_out_source
        files = {
            named: fetch_artifact(FlyteFile(named)) if "://" in named else resolve_local_path(named)
            for named in filter(None, [*sources, judged])
        }
        table, report = prepare_prompt_table(
            recipe, *(files[named] for named in sources), held_out=files[judged] if judged else None
        )
        logger.info("%s", report)
        run_logger.log_dataset(
            "prompts", table, context="training", source=", ".join(files) or "made up"
        )
        path = make_node_output(run, "prompts", "prompts.parquet")
        write_prompts(table, path)
    return FlyteFile(str(path))
