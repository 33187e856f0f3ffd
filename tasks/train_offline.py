"""Train an offline stage on its rollouts or pairs, in a group of FSDP2 processes on one node or
several.
"""

from __future__ import annotations

from contextlib import nullcontext

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.branches import first_logged_step
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact_once, make_node_output, open_checkpoints
from tasks.preemption import retry_on_errors
from tasks.resources import DEPLOYMENT, training_group_resources
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
) -> TrainedPolicy:
    """Train the stage; return its policy folder. Every rank runs this body; only what rank 0 writes
    and returns counts.
    """
    from ebbflow.compute import set_up_process
    from ebbflow.offline.training import train_offline_folder
    from ebbflow.stage import MetricsRecorder, StageContext
    from ebbflow.tracking.child_run import open_node_run
    from ebbflow.tracking.curves import read_rollout_curves
    from ebbflow.tracking.nodes import log_stage
    from ebbflow.training.distributed import (
        PeerLost,
        enter_phase,
        join_process_group,
        seconds_since_launch,
    )
    from ebbflow.training.stop_conditions import Preempted

    set_up_process(recipe)  # before NCCL starts
    ctx = StageContext(recipe, round, stage)
    trained = make_node_output(run, ctx.stage_label, "policy")
    metrics = make_node_output(run, ctx.stage_label, "metrics.json")
    first_step = first_logged_step(ctx, policy)
    with (
        retry_on_errors(Preempted, PeerLost),
        join_process_group(recipe.model.cpu_offload) as ranks,
        # MLflow has one writer: every rank would add a run of its own.
        open_node_run(run, ctx.stage_label, first_step)
        if ranks.rank == 0
        else nullcontext() as run_logger,
    ):
        recorder = MetricsRecorder(run_logger)
        enter_phase("downloading the inputs")
        shards = [fetch_artifact_once(shard) for shard in rollouts]
        if run_logger and first_step is not None:
            run_logger.log_curves(read_rollout_curves(fetch_artifact_once(advantages)), first_step)
        checkpoints = open_checkpoints(run, ctx, ranks.rank, ranks.local_rank)
        # The first rank of each machine has downloaded them when all have come here.
        ranks.wait_for_all()
        starting = seconds_since_launch()
        record = train_offline_folder(
            ctx,
            fetch_artifact_once(base.folder),
            fetch_artifact_once(policy.folder),
            fetch_artifact_once(prompts),
            shards,
            fetch_artifact_once(advantages),
            trained,
            recorder,
            checkpoints,
            replicas=ranks.num_nodes if DEPLOYMENT.train_sharding == "hybrid" else 1,
            context_parallel=DEPLOYMENT.train_context_parallel,
        )
        record = record.model_copy(
            update={"seconds": {"process_start": starting, **record.seconds}}
        )
        if run_logger:
            log_stage(run_logger, record)
            recorder.write_json(metrics)
    return TrainedPolicy.from_stage(policy, trained, metrics, record, record.steps)
