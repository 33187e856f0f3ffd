"""Generate one shard of an offline stage's rollouts; mapped over the shards."""

from __future__ import annotations

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact, make_node_output
from tasks.resources import accelerated_resources
from tasks.types import BaseModelArtifact, TrainedPolicy


@task(cache=ONCE_PER_RUN, **accelerated_resources())
def generate_rollouts(
    # First, because it is the input that is mapped over (``tasks.cache.map_over_values``).
    shard: int,
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    policy: TrainedPolicy,
    prompts: FlyteFile,
    round: int,
    stage: int,
) -> FlyteFile:
    """Generate a rollout shard (``rollout_schema``)."""
    from ebbflow.offline.rollouts import generate_shard_from_folders
    from ebbflow.stage import StageContext
    from ebbflow.tracking.child_run import open_node_run
    from ebbflow.tracking.nodes import log_shard

    ctx = StageContext(recipe, round, stage)
    node = f"{ctx.stage_label} rollout {shard}"
    path = make_node_output(run, node, f"rollouts-{shard}.parquet")
    with open_node_run(run, node) as run_logger:
        generate_shard_from_folders(
            ctx,
            fetch_artifact(base.folder),
            fetch_artifact(policy.folder),
            fetch_artifact(prompts),
            shard,
            path,
        )
        log_shard(run_logger, path)
    return FlyteFile(str(path))
