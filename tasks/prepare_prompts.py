"""Prepare the prompt table: read from a file or generated, and split by prompt id."""

from __future__ import annotations

import logging

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_prompt_file, make_node_output
from tasks.resources import light_resources

logger = logging.getLogger(__name__)


@task(cache=ONCE_PER_RUN, **light_resources())
def prepare_prompts(recipe: Recipe, run: TrackedRun) -> FlyteFile:
    """Write the prompt table (schema ``PROMPTS``), and log it as the run's dataset."""
    from ebbflow.data.prepare import prepare_prompt_table
    from ebbflow.data.prompts import write_prompts
    from ebbflow.data.twins import digest_held_out
    from ebbflow.registry.gate_policy import require_gate_policy
    from ebbflow.tracking.child_run import open_node_run

    with open_node_run(run, "prompts") as run_logger:
        sources = recipe.prompts.source_files
        held_out_source = recipe.prompts.held_out_source
        files = {}
        for source in filter(None, [*sources, held_out_source]):
            files[source] = fetch_prompt_file(source)
        table, report = prepare_prompt_table(
            recipe,
            *(files[source] for source in sources),
            held_out=files[held_out_source] if held_out_source else None,
        )
        logger.info("%s", report)
        # A file that has changed may hold out other prompts than those that the champion passed.
        require_gate_policy(recipe, run.tracking_uri, digest_held_out(table))
        run_logger.log_dataset(
            "prompts", table, context="training", source=", ".join(files) or "made up"
        )
        path = make_node_output(run, "prompts", "prompts.parquet")
        write_prompts(table, path)
    return FlyteFile(str(path))
