"""An online stage from folder to folder: it opens the models and the workers on them, runs the
loop, and leaves the trained policy.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING

from ebbflow.data.prompts import read_prompts
from ebbflow.data.records import StageRecord
from ebbflow.extras import require
from ebbflow.models.context_parallel import require_shareable_stage
from ebbflow.offline.anchor import open_anchor
from ebbflow.online.colocated import ColocatedTrainingWorker, ColocatedWorkers
from ebbflow.online.loop import OnlineLoop
from ebbflow.online.monitor import read_validation_prompts
from ebbflow.online.sample_workers import RolloutWorker
from ebbflow.online.training_worker import TrainingWorker
from ebbflow.online.workers import LocalWorkers, StageWorkers
from ebbflow.rewards.combine import load_scorer
from ebbflow.rollouts.engine import open_engine
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.training.checkpoint import Checkpoints
from ebbflow.training.distributed import Ranks
from ebbflow.training.group_checkpoints import GroupCheckpoints
from ebbflow.training.policy_io import load_policy, read_prompt_statistics
from ebbflow.training.policy_metadata import read_policy_metadata
from ebbflow.training.stage_loop import StageState
from ebbflow.training.stop_conditions import handle_sigterm
from ebbflow.training.update import PolicyUpdater

if TYPE_CHECKING:
    from ebbflow.online.ray_actor import ActorFolders


def train_online_folder(
    ctx: StageContext,
    folders: StageFolders,
    recorder: MetricsRecorder,
    actors: ActorFolders | None = None,
    checkpoints: Checkpoints | None = None,
    replicas: int = 1,
    context_parallel: int = 1,
) -> StageRecord:
    """Run the stage on the policy of ``folders.policy`` and leave the trained one at
    ``folders.output``.

    Args:
        actors: where workers under ``placement: ray`` find what they load; by default at the paths
            of ``folders`` on every machine.
        checkpoints: those of an earlier attempt, from which the stage resumes, and of this one.
        replicas: as of ``Policy``, under ``placement: colocated``.
        context_parallel: as of ``Policy``; under ``placement: ray``, of the training group.

    Raises:
        ModelError: the tokens of a sample cannot be shared.
        Preempted: the machine is taken away; what was learnt so far is in the checkpoints.
    """
    require_shareable_stage(ctx.online_config, context_parallel)
    if checkpoints and ctx.online_config.placement == "colocated":
        checkpoints = GroupCheckpoints.of_group(checkpoints)
    validation = read_validation_prompts(ctx, folders.prompts)
    training = read_prompts(folders.prompts, "train")
    # Models take minutes to load, so a SIGTERM counts from here on. Workers are closed after an
    # error, too: Ray actors would keep their GPUs.
    with (
        handle_sigterm(),
        closing(open_workers(ctx, folders, actors, replicas, context_parallel)) as workers,
    ):
        metadata = read_policy_metadata(folders.policy)
        state = StageState(read_prompt_statistics(ctx, metadata, folders.policy))
        loop = OnlineLoop(ctx, workers, training, recorder, state, validation, checkpoints)

        # One event loop for both: on Ray the policy folder comes from rank 0 by calls that are
        # awaited like those of the steps.
        async def run_and_save() -> StageRecord:
            # Of the first rank: the ranks of a stage have GPUs of one kind.
            devices = await workers.training.call(TrainingWorker.describe_device)
            recorder.log_tags(devices[0])
            record = await loop.run()
            await workers.save_policy(folders.output, record, state.history)
            return record

        return asyncio.run(run_and_save())


def open_workers(
    ctx: StageContext,
    folders: StageFolders,
    actors: ActorFolders | None = None,
    replicas: int = 1,
    context_parallel: int = 1,
) -> StageWorkers:
    """Open the stage's workers, on the policy of ``folders.policy``."""
    if ctx.online_config.placement == "ray":
        # Ray is imported by those who use it: a stage in one process starts without it.
        require("placement: ray", "ray")
        from ebbflow.online.ray_actor import ActorFolders
        from ebbflow.online.ray_workers import RayWorkers

        same_paths = ActorFolders.from_paths(folders.base, folders.policy, folders.teachers)
        return RayWorkers(ctx, actors or same_paths, context_parallel)
    ranks = Ranks.current()
    policy, metadata = load_policy(
        ctx,
        folders.base,
        folders.policy,
        folders.teachers,
        ranks.world > 1,
        replicas,
        context_parallel,
    )
    # Only validations score guardrails; without one their networks need no memory.
    guardrails = ctx.recipe.guardrails if ctx.online_config.validation else ()
    scorer = load_scorer(ctx.branch_recipe.rewards, guardrails)
    updater = PolicyUpdater(policy, ctx.online_config, metadata)
    updater.anchor = open_anchor(ctx, policy.model, folders.anchor)
    if ctx.online_config.placement == "colocated":
        return ColocatedWorkers(
            ColocatedTrainingWorker(ctx, updater, metadata, ranks.rank, scorer), scorer
        )
    trainer = TrainingWorker(ctx, updater, metadata, scorer=scorer)
    rollout_worker = None
    # Another engine holds weights of its own. The reference engine has none: ``LocalWorkers`` lets
    # it generate with the trainer's.
    if ctx.online_config.engine != "diffusers":
        rollout_worker = RolloutWorker(open_engine(ctx, folders.base))
    return LocalWorkers(trainer, scorer, rollout_worker)
