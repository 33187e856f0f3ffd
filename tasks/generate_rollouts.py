"""Generate one shard of an offline stage's rollouts; mapped over the shards."""

from __future__ import annotations

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact_once, make_node_output
from tasks.generating_group import join_generating_group, open_node_run_once
from tasks.resources import generating_resources
from tasks.types import BaseModelArtifact, TrainedPolicy


@task(cache=ONCE_PER_RUN, **generating_resources())
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
    """Generate a rollout shard (``rollout_schema``). Every process of the pod runs this body; only
    what rank 0 writes and returns counts.
    """
    from ebbflow.offline.rollouts import generate_shard_from_folders
    from ebbflow.stage import StageContext
    from ebbflow.tracking.nodes import log_shard
    from ebbflow.training.rounds import call_on_first

    ctx = StageContext(recipe, round, stage)
    node = f"{ctx.stage_label} rollout {shard}"
    with join_generating_group(recipe), open_node_run_once(run, node) as run_logger:
        path = call_on_first(lambda: make_node_output(run, node, f"rollouts-{shard}.parquet"))
        generate_shard_from_folders(
            ctx,
            fetch_artifact_once(base.folder),
            fetch_artifact_once(policy.folder),
            fetch_artifact_once(prompts),
            shard,
            path,
        )
        if run_logger:
            log_shard(run_logger, path)
    return FlyteFile(str(path))
