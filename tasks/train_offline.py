"""Train an offline stage on its rollouts or pairs, in a group of FSDP2 processes on one node or
several.
"""

from __future__ import annotations

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.branches import first_logged_step
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_anchor, fetch_artifact_once, open_checkpoints
from tasks.resources import DEPLOYMENT, count_replicas, training_group_resources
from tasks.training_group import join_training_group
from tasks.types import BaseModelArtifact, TrainedPolicy


@task(cache=ONCE_PER_RUN, **training_group_resources())
def train_offline(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    policy: TrainedPolicy,
    prompts: FlyteFile,
    round: int,
    stage: int,
    rollouts: list[FlyteFile],
    advantages: FlyteFile,
    anchor_tables: list[FlyteFile] | None = None,
    anchor_latents: list[FlyteFile] | None = None,
) -> TrainedPolicy:
    """Train the stage; return its policy folder. Every rank runs this body; only what rank 0 writes
    and returns counts.
    """
    from ebbflow.offline.training import train_offline_folder
    from ebbflow.stage import StageContext, StageFolders
    from ebbflow.tracking.curves import read_rollout_curves

    ctx = StageContext(recipe, round, stage)
    with join_training_group(ctx, run, policy, main_memory=recipe.model.cpu_offload) as member:
        ranks = member.ranks
        shards = [fetch_artifact_once(shard) for shard in rollouts]
        first_step = first_logged_step(ctx, policy)
        if member.run_logger and first_step is not None:
            curves = read_rollout_curves(fetch_artifact_once(advantages))
            member.run_logger.log_curves(curves, first_step)
        checkpoints = open_checkpoints(run, ctx, ranks.rank, ranks.local_rank)
        starting = member.wait_for_inputs()
        folders = StageFolders(
            fetch_artifact_once(base.folder),
            fetch_artifact_once(policy.folder),
            fetch_artifact_once(prompts),
            member.policy_folder,
            anchor=fetch_anchor(anchor_tables, anchor_latents),
        )
        record = train_offline_folder(
            ctx,
            folders,
            shards,
            fetch_artifact_once(advantages),
            member.recorder,
            checkpoints,
            replicas=count_replicas(ranks),
            context_parallel=DEPLOYMENT.train_context_parallel,
        )
        return member.finish_stage(policy, record, starting)
