"""Compute the advantages of an offline stage over all its shards."""

from __future__ import annotations

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact, make_node_output
from tasks.resources import light_resources


@task(cache=ONCE_PER_RUN, **light_resources())
def compute_advantages(
    recipe: Recipe, run: TrackedRun, round: int, stage: int, scores: list[FlyteFile]
) -> FlyteFile:
    """Compute the advantage of every sample that is trained on (``ADVANTAGES``)."""
    from ebbflow.offline.advantages import write_advantages
    from ebbflow.stage import StageContext
    from ebbflow.tracking.child_run import open_node_run

    ctx = StageContext(recipe, round, stage)
    node = f"{ctx.stage_label} advantages"
    path = make_node_output(run, node, "advantages.parquet")
    with open_node_run(run, node) as run_logger:
        # One task over all shards: statistics of a group or of the batch need all of its samples.
        shards = [fetch_artifact(shard) for shard in scores]
        run_logger.log_metrics(write_advantages(ctx, shards, path), step=0)
    return FlyteFile(str(path))
