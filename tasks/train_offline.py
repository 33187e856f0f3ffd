"""Train an offline stage on its rollouts or pairs, in a group of FSDP2 processes on one node or
several.
"""

from __future__ import annotations

from contextlib import nullcontext

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.branches import first_step
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_shared, node_output, open_checkpoints
from tasks.preemption import retry_on
from tasks.resources import DEPLOYMENT, training_group
from tasks.types import BaseModelArtifact, TrainedPolicy


@task(cache=ONCE_PER_RUN, **training_group())
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
    """The policy folder after the stage. Every rank runs this body; only what rank 0 writes and
    returns counts.
    """
    from ebbflow.compute import set_up_process
    from ebbflow.offline.training import train_offline_folder
    from ebbflow.stage import MetricsRecorder, StageContext
    from ebbflow.tracking.child_run import node_run
    from ebbflow.tracking.curves import rollout_curves
    from ebbflow.tracking.nodes import log_stage
    from ebbflow.training.distributed import PeerLost, process_group, seconds_since_launch
    from ebbflow.training.stop_conditions import Preempted

    set_up_process(recipe)  # before NCCL starts
    ctx = StageContext(recipe, round, stage)
    trained, metrics = (node_output(run, ctx.label, name) for name in ("policy", "metrics.json"))
    with (
        retry_on(Preempted, PeerLost),
        process_group(recipe.model.cpu_offload) as ranks,
        node_run(run, ctx.label, first_step(ctx, policy))
        if ranks.rank == 0
        else nullcontext() as run_logger,
    ):
        recorder = MetricsRecorder(run_logger)
        shards = [fetch_shared(shard) for shard in rollouts]
        if run_logger and (step := first_step(ctx, policy)) is not None:
            run_logger.log_curves(rollout_curves(fetch_shared(advantages)), step)
        checkpoints = open_checkpoints(run, ctx, ranks.rank, ranks.local_rank)
        ranks.barrier()  # the first rank of each machine has downloaded them
        starting = seconds_since_launch()
        record = train_offline_folder(
            ctx,
            fetch_shared(base.folder),
            fetch_shared(policy.folder),
            fetch_shared(prompts),
            shards,
            fetch_shared(advantages),
            trained,
            recorder,
            checkpoints,
            replicas=ranks.nodes if DEPLOYMENT.train_sharding == "hybrid" else 1,
            context_parallel=DEPLOYMENT.train_context_parallel,
        )
        record = record.model_copy(
            update={"seconds": {"process_start": starting, **record.seconds}}
        )
        if run_logger:
            log_stage(run_logger, record)
            recorder.write(metrics)
    global_step = policy.global_step + record.steps
    return TrainedPolicy(
        folder=FlyteDirectory(str(trained)),
        record=record,
        metrics=FlyteFile(str(metrics)),
        global_step=global_step,
    )
