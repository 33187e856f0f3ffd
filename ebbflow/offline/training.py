"""The training of an offline stage: epochs over the stored rollouts."""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.records import StageRecord
from ebbflow.data.schema import ADVANTAGES
from ebbflow.flow.noise import SampleKeys
from ebbflow.models import Conditioning, Model
from ebbflow.models.encoding import Encode, encode_once
from ebbflow.offline.shards import read_latents, require_shard, seconds_of
from ebbflow.recipe.algorithms import ForwardConfig
from ebbflow.seeding import Stream, generator
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.storage.disk import DiskFullError, raise_if_disk_full
from ebbflow.storage.tables import read_column, read_table, read_table_metadata, row_count
from ebbflow.timing import Clock
from ebbflow.training.batches import SampleGroups, forward_batch, num_micro_batches, shard_for_rank, split_evenly
from ebbflow.training.checkpoint import Checkpoints, restore, step_of, write_part
from ebbflow.training.distributed import Ranks, first
from ebbflow.training.policy_io import load_policy, save_policy
from ebbflow.training.stage_loop import StageLoop, StageState, load_stage_state
from ebbflow.training.stop_conditions import handle_sigterm
from ebbflow.training.update import PolicyUpdater, TrainingError


@dataclass(frozen=True)
class Shard:
    """The rows of a rollout shard that are worth training on: row numbers, keys, advantages, and which of them stay together."""

    path: Path
    rows: np.ndarray
    prompt_ids: np.ndarray
    samples: np.ndarray
    advantage: np.ndarray
    groups: SampleGroups


@dataclass(frozen=True)
class Part:
    """One process's part of a batch: a row per sample.

    Attributes:
        epoch: how often these samples were trained on before.
        groups: of the whole batch, over all processes.
        group_index: integer [N], ascending: which samples stay together.
        clean: final latents, fp32 [N, ...].
        conditioning: the encoded prompts.
        advantage: [N].
    """

    epoch: int
    groups: SampleGroups
    keys: SampleKeys
    group_index: np.ndarray
    clean: Tensor
    conditioning: Conditioning
    advantage: Tensor


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
    """Train the updater's policy in place on stored rollouts; every process of an FSDP group calls it with the same arguments.

    Where a copy of the policy generated the rollouts, the copies stay as they are.

    Args:
        prompts: the training split.
        recorder: gets the metrics of every optimiser step and its number, from zero.
        checkpoints: those of an earlier attempt, from which the training resumes, and of this one.

    Raises:
        Preempted: the machine is taken away; what was learnt so far is in the checkpoints.
        CheckpointError: with so many processes the epochs have another number of steps than those of the checkpoint.
    """
    config, ranks, clock = ctx.offline, Ranks.current(), Clock()
    table = read_table(advantages, ADVANTAGES)
    shards = _large_enough([_trainable_rows(ctx, path, table) for path in rollouts], updater, ranks)
    num_steps = config.epochs * sum(len(_batches(shard.groups, config.batch_size, ranks.world)) for shard in shards)
    state = _resumed(checkpoints, updater, recorder, ranks, num_steps)
    parts = _parts(ctx, model, prompts, shards, ranks, state.step)
    gpus = float(ranks.world * torch.cuda.is_available())
    with handle_sigterm():
        loop = StageLoop(ctx, state, recorder, checkpoints, num_steps, gpus, quiet=ranks.rank > 0)
        for step, part in zip(loop.steps(), parts, strict=False):
            metrics = _timed_update(ctx, updater, part, ranks, clock)
            state.seconds["training"] = state.seconds.get("training", 0.0) + metrics["seconds/training"]
            loop.finish_step(metrics, loss=f"{metrics['loss']:.4f}")
            if step + 1 < num_steps and checkpoints and (loop.preempted or checkpoints.due(step + 1)):
                _save_checkpoint(checkpoints, updater, ranks, loop)
            if step + 1 < num_steps and loop.preempted:
                raise loop.preemption()
    return StageRecord(
        label=ctx.label,
        algorithm=config.algorithm_name,
        samples=sum(row_count(path) for path in rollouts),
        optimizer_steps=updater.updates,
        steps=state.step,
        seconds=seconds_of(rollouts, "rollout") | read_table_metadata(advantages)["seconds"] | {"training": 0.0} | state.seconds,
        alarms=[*updater.alarms, *state.alarms],
    )


def samples_of_step(
    ctx: StageContext, rollouts: list[Path], advantages: Path, step: int, processes: int
) -> tuple[Path, np.ndarray, np.ndarray] | None:
    """What an optimiser step trains on, over all processes: (shard, row numbers [N], advantages [N]); None after the last step.

    Args:
        step: from zero.
        processes: that train together. They decide how the samples are divided into batches.
    """
    table = read_table(advantages, ADVANTAGES)
    shards = [shard for path in rollouts if len((shard := _trainable_rows(ctx, path, table)).groups) >= processes]
    visit = next(islice(_schedule(ctx, shards, Ranks(0, processes)), step, None), None)
    if visit is None:
        return None
    _, index, batch = visit
    rows = np.concatenate(batch)
    return shards[index].path, shards[index].rows[rows], shards[index].advantage[rows]


def train_offline_folder(
    ctx: StageContext,
    base: Path,
    folder: Path,
    prompts: Path,
    rollouts: list[Path],
    advantages: Path,
    trained: Path,
    recorder: MetricsRecorder,
    checkpoints: Checkpoints | None = None,
) -> StageRecord:
    """``train_epochs`` from a policy folder to a new one; shards the model over the process group where there is one."""
    with handle_sigterm():
        ranks = Ranks.current()
        policy, metadata = load_policy(ctx, base, folder, shard=ranks.world > 1)
        updater = PolicyUpdater(policy, ctx.offline, metadata)
        trained_on = read_prompts(prompts, "train")
        known = {prompt.prompt_id for prompt in trained_on}
        for path in rollouts:
            require_shard(ctx, path, known, policy.model.latent_shape)
        record = train_epochs(ctx, policy.model, updater, trained_on, rollouts, advantages, recorder, checkpoints)
        if ctx.algorithm.generates != "current":
            for name in ctx.following:
                policy.snapshot(name)  # the next stage generates with what this one learnt, and compares with it
        save_policy(ctx, updater, metadata, record, trained, write=ranks.rank == 0)
    return record


def _resumed(
    checkpoints: Checkpoints | None, updater: PolicyUpdater, recorder: MetricsRecorder, ranks: Ranks, num_steps: int
) -> StageState:
    """Bring the updater to the newest checkpoint, if there is one; where the stage stands there.

    Rank 0 chooses: it reads all of a checkpoint to see that it is whole, and the others must not see something else.
    """
    newest = checkpoints.newest() if checkpoints and ranks.rank == 0 else None
    step, state = first(step_of(newest[0]) if newest else 0), StageState()
    if checkpoints and step:
        folder, saved = checkpoints.at(step)
        load_stage_state(folder, saved, state, recorder, num_steps)
        restore(folder, updater)
    return state


def _save_checkpoint(checkpoints: Checkpoints, updater: PolicyUpdater, ranks: Ranks, loop: StageLoop) -> None:
    """A checkpoint of all processes of this machine; none continues, or ends, before it is whole."""
    parts = checkpoints.folder / ".parts"
    if ranks.rank == 0:
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir(parents=True)
    ranks.barrier()
    try:
        with raise_if_disk_full(parts):
            write_part(parts, updater)
    except DiskFullError:
        shutil.rmtree(parts, ignore_errors=True)
        raise
    ranks.barrier()
    if ranks.rank == 0:
        with checkpoints.saving(loop.state.step, loop.checkpoint_state()) as folder:
            _move(parts, folder)
    ranks.barrier()


def _move(parts: Path, folder: Path) -> None:
    for path in parts.iterdir():
        path.replace(folder / path.name)


def _timed_update(ctx: StageContext, updater: PolicyUpdater, part: Part, ranks: Ranks, clock: Clock) -> dict[str, float]:
    """The metrics of an optimiser step, and how long it took."""
    before = clock.seconds["training"]
    with clock.phase("training"):
        metrics = _update(ctx, updater, part, ranks)
    seconds, images = clock.seconds["training"] - before, sum(map(len, part.groups))
    speed = {"seconds/training": seconds, "ms_per_image/training": 1000 * seconds / images}
    return metrics | speed | {"epoch": part.epoch}


def _update(ctx: StageContext, updater: PolicyUpdater, part: Part, ranks: Ranks) -> dict[str, float]:
    """One optimiser step of all processes, this one on its part of the batch."""
    hyper = ctx.config.hyper
    assert isinstance(hyper, ForwardConfig)
    device = part.conditioning.device
    clean, advantage = part.clean.to(device), part.advantage.to(device)
    samples = (clean, part.conditioning, advantage, part.keys, part.group_index)
    batch = forward_batch(*samples, hyper, updater.schedule, visit=part.epoch)
    return updater.update(batch, num_micro_batches(part.groups, ranks.world, hyper.noise_levels, ctx.config.micro_batch))


def _trainable_rows(ctx: StageContext, path: Path, advantages: pa.Table) -> Shard:
    keys = pa.table({name: read_column(path, name) for name in ("prompt_id", "sample")})
    keys = keys.append_column("row", pa.array(np.arange(len(keys))))
    found = keys.join(advantages, ["prompt_id", "sample"], join_type="inner").sort_by("row")
    rows, prompt_ids, samples, advantage = (found[name].to_numpy() for name in ("row", "prompt_id", "sample", "advantage"))
    groups = ctx.algorithm.select(advantage, np.ones(len(rows), bool), prompt_ids, ctx.config.hyper)
    return Shard(path, rows, prompt_ids, samples, advantage, groups)


def _large_enough(shards: list[Shard], updater: PolicyUpdater, ranks: Ranks) -> list[Shard]:
    """The shards from which every process gets a group; the others are named in an alarm.

    Raises:
        TrainingError: there is something to learn from, and no shard of it is large enough.
    """
    large = [shard for shard in shards if len(shard.groups) >= ranks.world]
    left_out = {shard.path.name: len(shard.groups) for shard in shards if 0 < len(shard.groups) < ranks.world}
    if not any(shard.groups for shard in shards):
        updater.alarms.append("nothing was learnt: no group has samples that score differently")
        warnings.warn(updater.alarms[-1], stacklevel=3)
    if not left_out:
        return large
    listed = ", ".join(f"{name} ({groups})" for name, groups in left_out.items())
    problem = f"shards with fewer samples, pairs or groups to train on than the {ranks.world} processes: {listed}"
    if not large:
        raise TrainingError(f"{problem}; lower the stage's 'shards' or EBBFLOW_TRAIN_PROCESSES, or generate more prompts")
    updater.alarms.append(f"left out: {problem}")
    if ranks.rank == 0:
        warnings.warn(updater.alarms[-1], stacklevel=3)
    return large


def _parts(
    ctx: StageContext, model: Model, prompts: list[Prompt], shards: list[Shard], ranks: Ranks, done: int
) -> Iterator[Part]:
    """This process's part of the batch of every optimiser step after those that are done. Prompts are encoded at once."""
    if not shards:
        return iter(())
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    wanted = (by_id[i] for shard in shards for i in shard.prompt_ids.tolist())
    encode = encode_once(model, wanted, negatives=ctx.config.reference.guided)
    schedule = islice(_schedule(ctx, shards, ranks), done, None)

    def parts() -> Iterator[Part]:
        for (epoch, index), batches in groupby(schedule, key=lambda visit: visit[:2]):
            shard, latents = shards[index], read_latents(shards[index].path)
            for *_, batch in batches:
                yield _part(ctx, shard, latents, by_id, encode, epoch, batch, ranks)

    return parts()


def _schedule(ctx: StageContext, shards: list[Shard], ranks: Ranks) -> Iterator[tuple[int, int, SampleGroups]]:
    """(epoch, shard, batch) of every optimiser step.

    An epoch goes through the shards in a seeded order and shuffles inside each, so one shard is in memory at a time.
    """
    for epoch in range(ctx.offline.epochs):
        for index in _order(ctx.seed, epoch, 0, len(shards)).tolist():
            groups = shards[index].groups
            order = [groups[i] for i in _order(ctx.seed, epoch, 1 + index, len(groups))]
            for batch in _batches(order, ctx.offline.batch_size, ranks.world):
                yield epoch, index, batch


def _part(
    ctx: StageContext,
    shard: Shard,
    latents: Tensor,
    prompts: dict[int, Prompt],
    encode: Encode,
    epoch: int,
    batch: SampleGroups,
    ranks: Ranks,
) -> Part:
    """This process's part of a batch."""
    mine = shard_for_rank(batch, ranks)
    rows = np.concatenate(mine)
    keys = SampleKeys(ctx.seed, shard.prompt_ids[rows].tolist(), shard.samples[rows].tolist())
    group_index = np.repeat(np.arange(len(mine)), [len(group_index) for group_index in mine])
    conditioning, advantage = encode([prompts[i] for i in keys.prompt_ids]), torch.from_numpy(shard.advantage[rows])
    return Part(epoch, batch, keys, group_index, latents[shard.rows[rows]], conditioning, advantage)


def _batches(groups: SampleGroups, batch_size: int, world: int) -> list[SampleGroups]:
    """The groups in equal batches of about ``batch_size`` samples, each with one for every process: no small last one."""
    samples = sum(map(len, groups))
    return split_evenly(groups, min(math.ceil(samples / batch_size), len(groups) // world))


def _order(seed: int, epoch: int, index: int, count: int) -> np.ndarray:
    return generator(seed, prompt_id=0, sample=epoch, step=index, stream=Stream.ORDER).permutation(count)
