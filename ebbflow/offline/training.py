"""The training of an offline stage: epochs over the stored rollouts."""

from __future__ import annotations

import logging
import warnings
from contextlib import closing
from pathlib import Path

import torch

from ebbflow.compute import log_device
from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.records import StageRecord
from ebbflow.models import Model
from ebbflow.models.base import generate_in_size
from ebbflow.models.context_parallel import require_shareable_stage
from ebbflow.offline.anchor import open_anchor
from ebbflow.offline.batches import (
    BatchPart,
    Shard,
    count_batches,
    list_trainable_shards,
    open_batch_parts,
)
from ebbflow.offline.shards import (
    check_shard,
    read_image_size,
    read_stage_identity,
    sum_phase_seconds,
)
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.tables import count_rows, read_table_metadata
from ebbflow.timing import Clock
from ebbflow.training.batches import count_shared_micro_batches
from ebbflow.training.checkpoint import (
    Checkpoints,
    collect_parts,
    restore_updater,
    write_part,
)
from ebbflow.training.distributed import Ranks, enter_phase
from ebbflow.training.group_checkpoints import GroupCheckpoints
from ebbflow.training.kinds.base import trainable_kind
from ebbflow.training.passes import TrainingError
from ebbflow.training.policy_io import load_policy, save_policy
from ebbflow.training.stage_loop import StageLoop, StageState, load_stage_state
from ebbflow.training.stop_conditions import handle_sigterm
from ebbflow.training.update import PolicyUpdater
from ebbflow.watchdog import watch

logger = logging.getLogger(__name__)


def train_epochs(
    ctx: StageContext,
    model: Model,
    updater: PolicyUpdater,
    prompts: list[Prompt],
    rollouts: list[Path],
    advantages: Path,
    recorder: MetricsRecorder,
    checkpoints: Checkpoints | None = None,
) -> StageRecord:
    """Train the updater's policy in place on stored rollouts; every process of an FSDP group calls
    it with the same arguments.

    Where a copy of the policy generated the rollouts, the copies stay as they are.

    Args:
        prompts: the training split.
        recorder: gets the metrics of every optimiser step and its number, from zero.
        checkpoints: those of an earlier attempt, from which the training resumes, and of this one.

    Raises:
        Preempted: the machine is taken away; what was learnt so far is in the checkpoints.
        CheckpointError: with so many processes the epochs have another number of steps than those
            of the checkpoint.
        TrainingError: every step would be warm-up, or no shard has a group for every process.
    """
    ranks = Ranks.current()
    group_checkpoints = GroupCheckpoints.of_group(checkpoints) if checkpoints else None
    row_ranks = ranks.row_ranks(updater.policy.context_parallel)
    clock = Clock()

    shards, num_steps = _plan_steps(ctx, updater, rollouts, advantages, row_ranks)
    updater.num_updates = num_steps
    state = _resume_training(group_checkpoints, updater, recorder, ranks, num_steps)

    gpus = float(ranks.world * torch.cuda.is_available())
    parts = open_batch_parts(ctx, model, prompts, shards, row_ranks, state.step)
    with closing(parts), handle_sigterm():
        loop = StageLoop(
            ctx, state, recorder, group_checkpoints, num_steps, gpus, quiet=ranks.rank > 0
        )
        # The same list: the loop pushes what the updater adds to it.
        state.training_alarms = updater.alarms
        for step, part in zip(loop.iterate_steps(), parts, strict=False):
            phase = f"training step {step + 1} of {num_steps}"
            enter_phase(phase)
            with watch(f"rank {ranks.rank}: {phase}"):
                metrics = _time_update(ctx, updater, part, row_ranks, clock)
            training_seconds = state.seconds.get("training", 0.0)
            state.seconds["training"] = training_seconds + metrics["seconds/training"]
            loop.finish_step(metrics, loss=f"{metrics['loss']:.4f}")
            if step + 1 == num_steps:
                continue  # the policy folder follows at once, and needs no checkpoint before it
            if group_checkpoints and (loop.preempted or group_checkpoints.is_due(step + 1)):
                _save_checkpoint(group_checkpoints, loop, updater)
            if loop.preempted:
                raise loop.preemption_error()
    return _build_record(ctx, updater, rollouts, advantages, state)


def _save_checkpoint(
    checkpoints: GroupCheckpoints, loop: StageLoop, updater: PolicyUpdater
) -> None:
    """Save the state of the stage and this rank's part of what it trains."""
    with checkpoints.save_step(loop.state.step, loop.build_checkpoint_state()) as folder:
        write_part(folder, updater)
        collect_parts(folder, updater)


def _build_record(
    ctx: StageContext,
    updater: PolicyUpdater,
    rollouts: list[Path],
    advantages: Path,
    state: StageState,
) -> StageRecord:
    """Build the record of a stage that has ended, with the seconds of its rollouts and scores."""
    generated = sum_phase_seconds(rollouts, "rollout")
    scored = read_table_metadata(advantages)["seconds"]
    return StageRecord(
        label=ctx.stage_label,
        algorithm=ctx.config.algorithm_name,
        samples=sum(count_rows(path) for path in rollouts),
        optimizer_steps=updater.updates,
        steps=state.step,
        seconds=generated | scored | {"training": 0.0} | state.seconds,
        alarms=[*state.training_alarms, *state.alarms],
    )


def train_offline_folder(
    ctx: StageContext,
    folders: StageFolders,
    rollouts: list[Path],
    advantages: Path,
    recorder: MetricsRecorder,
    checkpoints: Checkpoints | None = None,
    replicas: int = 1,
    context_parallel: int = 1,
) -> StageRecord:
    """``train_epochs`` from the policy folder that ``folders`` name to the one at their output;
    shards the model over the process group where there is one.

    Args:
        replicas: of the sharded model, as of ``Policy``; no more than one where there is no process
            group.
        context_parallel: as of ``Policy``; likewise.

    Raises:
        ModelError: tokens cannot be shared in such a model or stage.
    """
    require_shareable_stage(ctx.offline_config, context_parallel)
    with handle_sigterm():
        ranks = Ranks.current()
        enter_phase("loading the policy")
        policy, metadata = load_policy(
            ctx, folders.base, folders.policy, None, ranks.world > 1, replicas, context_parallel
        )
        recorder.log_tags(log_device())
        updater = PolicyUpdater(policy, ctx.offline_config, metadata)
        updater.anchor = open_anchor(ctx, policy.model, folders.anchor)
        trained_on = read_prompts(folders.prompts, "train")
        known = {prompt.prompt_id for prompt in trained_on}
        identity = read_stage_identity(ctx, advantages)
        # Before anything is trained, and not when an epoch comes to the shard.
        for path in rollouts:
            with generate_in_size(policy.model, read_image_size(ctx, path)):
                check_shard(ctx, path, known, policy.model.latent_shape, identity)
        record = train_epochs(
            ctx, policy.model, updater, trained_on, rollouts, advantages, recorder, checkpoints
        )
        if ctx.algorithm.generates != "current":
            # The copy that generated the samples stood still while they were trained on. The next
            # stage generates with what this one learnt, and compares with it.
            for name in ctx.following_copies:
                policy.snapshot_copy(name)
        enter_phase("writing the policy folder")
        save_policy(ctx, updater, metadata, record, folders.output, write=ranks.rank == 0)
    return record


def _resume_training(
    checkpoints: GroupCheckpoints | None,
    updater: PolicyUpdater,
    recorder: MetricsRecorder,
    ranks: Ranks,
    num_steps: int,
) -> StageState:
    """Bring the updater to the newest checkpoint, if there is one; return where the stage stands.

    Raises:
        CheckpointError, ArtifactError: another machine has not what rank 0 has.
    """
    newest = checkpoints.find_newest() if checkpoints else None
    state = StageState()
    if newest:
        folder, saved = newest
        load_stage_state(folder, saved, state, recorder, num_steps)
        restore_updater(folder, updater)
        if ranks.rank == 0:
            logger.info("resuming after step %d of %d", state.step, num_steps)
    return state


def _time_update(
    ctx: StageContext, updater: PolicyUpdater, part: BatchPart, ranks: Ranks, clock: Clock
) -> dict[str, float]:
    """Take an optimiser step; return its metrics and how long it took."""
    seconds_before = clock.seconds["training"]
    with clock.measure_phase("training"), generate_in_size(updater.policy.model, part.size):
        metrics = _update_policy(ctx, updater, part, ranks)
    seconds = clock.seconds["training"] - seconds_before
    images = sum(map(len, part.groups))  # of all processes
    speed = {"seconds/training": seconds, "ms_per_image/training": 1000 * seconds / images}
    return metrics | speed | {"epoch": part.epoch}


def _update_policy(
    ctx: StageContext, updater: PolicyUpdater, part: BatchPart, ranks: Ranks
) -> dict[str, float]:
    """Take one optimiser step of all processes, this one on its part of the batch."""
    kind = trainable_kind(updater.hyper.kind)
    # Latents wait in main memory, where the thread has read them to.
    device = part.conditioning.device
    batch = kind.build_offline_batch(
        updater,
        part.clean.to(device),
        part.conditioning,
        part.advantage.to(device),
        part.keys,
        part.group_index,
        part.epoch,
    )
    rows_per_sample = kind.rows_per_entry(updater.hyper)
    passes = count_shared_micro_batches(
        part.groups, ranks.world, rows_per_sample, ctx.config.micro_batch
    )
    return updater.update_policy(batch, passes)


def _plan_steps(
    ctx: StageContext,
    updater: PolicyUpdater,
    rollouts: list[Path],
    advantages: Path,
    row_ranks: Ranks,
) -> tuple[list[Shard], int]:
    """Return the shards to train on, and the optimiser steps of all epochs over them.

    Raises:
        TrainingError: every step would be warm-up, or no shard is large enough.
    """
    config = ctx.offline_config
    shards = list_trainable_shards(ctx, rollouts, advantages)
    shards = _drop_small_shards(shards, updater, row_ranks)
    num_steps = config.epochs * sum(
        count_batches(shard, config.batch_size, row_ranks) for shard in shards
    )
    # Only now is it known: the steps follow from what was generated and scored, and from the number
    # of processes. A stage without any steps has an alarm of its own.
    warmup = config.optimizer.schedule.warmup
    if 0 < num_steps <= warmup:
        raise TrainingError(
            f"optimizer.schedule.warmup = {warmup} takes the whole stage of {num_steps} optimiser"
            f" steps; lower it, or raise 'epochs' = {config.epochs}"
        )
    return shards, num_steps


def _drop_small_shards(shards: list[Shard], updater: PolicyUpdater, ranks: Ranks) -> list[Shard]:
    """Return the shards from which every process gets a group; the others are named in an alarm.

    Raises:
        TrainingError: there is something to learn from, and no shard of it is large enough.
    """
    large = [shard for shard in shards if shard.num_groups >= ranks.world]
    # A shard without any groups is no problem of its size: nothing in it varied.
    left_out = {
        shard.path.name: shard.num_groups for shard in shards if 0 < shard.num_groups < ranks.world
    }
    if not any(shard.num_groups for shard in shards):
        updater.alarms.append("nothing was learnt: no group has samples that score differently")
        warnings.warn(updater.alarms[-1], stacklevel=4)
    if not left_out:
        return large
    listed = ", ".join(f"{name} ({groups})" for name, groups in left_out.items())
    problem = (
        f"shards with fewer samples, pairs or groups to train on than the {ranks.world} processes:"
        f" {listed}"
    )
    if not large:
        raise TrainingError(
            f"{problem}; lower the stage's 'shards' or EBBFLOW_TRAIN_PROCESSES, or generate more"
            " prompts"
        )
    updater.alarms.append(f"left out: {problem}")
    if ranks.rank == 0:
        warnings.warn(updater.alarms[-1], stacklevel=4)
    return large
