"""The training of an offline stage: epochs over the stored rollouts."""

from __future__ import annotations

import math
import os
import shutil
import threading
import warnings
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.records import StageRecord
from ebbflow.data.schema import ADVANTAGES, KEY
from ebbflow.flow.noise import SampleKeys
from ebbflow.models import Conditioning, Model
from ebbflow.models.base import Size, device_of, generate_in_size
from ebbflow.models.context_parallel import require_one_size
from ebbflow.models.encoding import EMBEDDINGS, Encode, open_embeddings, write_embeddings
from ebbflow.offline.shards import (
    check_shard,
    read_image_size,
    read_latent_parts,
    sum_phase_seconds,
)
from ebbflow.seeding import Stream, make_generator
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.storage.disk import (
    DiskFullError,
    open_scratch_folder,
    path_of_scratch_folder,
    raise_if_disk_full,
)
from ebbflow.storage.tables import count_rows, read_columns, read_table, read_table_metadata
from ebbflow.timing import Clock
from ebbflow.training.batches import (
    SampleGroups,
    count_shared_micro_batches,
    shard_for_rank,
    split_evenly,
)
from ebbflow.training.checkpoint import (
    Checkpoints,
    collect_parts,
    restore_updater,
    step_of,
    write_part,
)
from ebbflow.training.distributed import Ranks, broadcast_first, broadcast_first_of_node
from ebbflow.training.gradients import TrainingError
from ebbflow.training.kinds.base import trainable_kind
from ebbflow.training.policy_io import load_policy, save_policy
from ebbflow.training.stage_loop import StageLoop, StageState, load_stage_state
from ebbflow.training.stop_conditions import handle_sigterm
from ebbflow.training.update import PolicyUpdater


@dataclass(frozen=True)
class Shard:
    """The rows of a rollout shard that are worth training on: row numbers, keys and advantages, and
    how many groups they make.
    """

    path: Path
    rows: np.ndarray
    prompt_ids: np.ndarray
    samples: np.ndarray
    advantage: np.ndarray
    num_groups: int
    num_selected: int
    """Samples in groups."""
    size: Size | None = None
    """Height and width of the images; None: those of the model."""


@dataclass(frozen=True)
class ShardVisit:
    """A shard in an epoch, and the batches of its samples that are trained on then."""

    epoch: int
    shard: Shard
    batches: list[SampleGroups]


@dataclass(frozen=True)
class BatchPart:
    """One process's part of a batch: a row per sample.

    Attributes:
        epoch: how often these samples were trained on before.
        groups: of the whole batch, over all processes.
        group_index: integer [N], ascending: which samples stay together.
        clean: final latents, fp32 [N, ...].
        conditioning: the encoded prompts.
        advantage: [N].
        size: height and width of the images; None: those of the model.
    """

    epoch: int
    groups: SampleGroups
    keys: SampleKeys
    group_index: np.ndarray
    clean: Tensor
    conditioning: Conditioning
    advantage: Tensor
    size: Size | None = None


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
    config = ctx.offline_config
    ranks = Ranks.current()
    clock = Clock()
    of_rows = ranks.row_ranks(updater.policy.context_parallel)
    shards = _drop_small_shards(_list_trainable_shards(ctx, rollouts, advantages), updater, of_rows)
    num_steps = config.epochs * sum(
        _count_batches(shard, config.batch_size, of_rows) for shard in shards
    )
    _check_warmup(ctx, num_steps)
    updater.num_updates = num_steps
    state = _resume_training(checkpoints, updater, recorder, ranks, num_steps)
    gpus = float(ranks.world * torch.cuda.is_available())
    with (
        closing(_open_parts(ctx, model, prompts, shards, ranks, of_rows, state.step)) as parts,
        handle_sigterm(),
    ):
        loop = StageLoop(ctx, state, recorder, checkpoints, num_steps, gpus, quiet=ranks.rank > 0)
        for step, part in zip(loop.iterate_steps(), parts, strict=False):
            metrics = _time_update(ctx, updater, part, of_rows, clock)
            state.seconds["training"] = (
                state.seconds.get("training", 0.0) + metrics["seconds/training"]
            )
            loop.finish_step(metrics, loss=f"{metrics['loss']:.4f}")
            if (
                step + 1 < num_steps
                and checkpoints
                and (loop.preempted or checkpoints.is_due(step + 1))
            ):
                _save_checkpoint(checkpoints, updater, ranks, loop)
            if step + 1 < num_steps and loop.preempted:
                raise loop.preemption_error()
    return StageRecord(
        label=ctx.stage_label,
        algorithm=config.algorithm_name,
        samples=sum(count_rows(path) for path in rollouts),
        optimizer_steps=updater.updates,
        steps=state.step,
        seconds=sum_phase_seconds(rollouts, "rollout")
        | read_table_metadata(advantages)["seconds"]
        | {"training": 0.0}
        | state.seconds,
        alarms=[*updater.alarms, *state.alarms],
    )


def find_samples_of_step(
    ctx: StageContext, rollouts: list[Path], advantages: Path, step: int, processes: int
) -> tuple[Path, np.ndarray, np.ndarray] | None:
    """What an optimiser step trains on, over all processes: (shard, row numbers [N], advantages
    [N]); None after the last step.

    Args:
        step: from zero.
        processes: that train together, those that share tokens counted once. They decide how the
            samples are divided.
    """
    shards = [
        shard
        for shard in _list_trainable_shards(ctx, rollouts, advantages)
        if shard.num_groups >= processes
    ]
    visit = next(_iterate_visits(ctx, shards, Ranks(0, processes), done=step), None)
    if visit is None:
        return None
    rows = np.concatenate(visit.batches[0])
    return visit.shard.path, visit.shard.rows[rows], visit.shard.advantage[rows]


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
    replicas: int = 1,
    context_parallel: int = 1,
) -> StageRecord:
    """``train_epochs`` from a policy folder to a new one; shards the model over the process group
    where there is one.

    Args:
        replicas: of the sharded model, as of ``Policy``; no more than one where there is no process
            group.
        context_parallel: as of ``Policy``; likewise.

    Raises:
        ModelError: tokens cannot be shared in such a model or stage.
    """
    require_one_size(ctx.offline_config, context_parallel)
    with handle_sigterm():
        ranks = Ranks.current()
        policy, metadata = load_policy(
            ctx, base, folder, None, ranks.world > 1, replicas, context_parallel
        )
        updater = PolicyUpdater(policy, ctx.offline_config, metadata)
        trained_on = read_prompts(prompts, "train")
        known = {prompt.prompt_id for prompt in trained_on}
        for path in rollouts:
            with generate_in_size(policy.model, read_image_size(ctx, path)):
                check_shard(ctx, path, known, policy.model.latent_shape)
        record = train_epochs(
            ctx, policy.model, updater, trained_on, rollouts, advantages, recorder, checkpoints
        )
        if ctx.algorithm.generates != "current":
            for name in ctx.following_copies:
                policy.snapshot_copy(
                    name
                )  # the next stage generates with what this one learnt, and compares with it
        save_policy(ctx, updater, metadata, record, trained, write=ranks.rank == 0)
    return record


def _resume_training(
    checkpoints: Checkpoints | None,
    updater: PolicyUpdater,
    recorder: MetricsRecorder,
    ranks: Ranks,
    num_steps: int,
) -> StageState:
    """Bring the updater to the newest checkpoint, if there is one; where the stage stands there.

    Rank 0 chooses: it reads all of a checkpoint to see that it is whole, and the others must not
    see something else.

    Raises:
        CheckpointError, ArtifactError: another machine has not what rank 0 has.
    """
    newest = checkpoints.find_newest() if checkpoints and ranks.rank == 0 else None
    step = broadcast_first(step_of(newest[0]) if newest else 0)
    state = StageState()
    if checkpoints and step:
        if ranks.local_rank == 0 and ranks.node_rank > 0:
            checkpoints.require_step(step)
        folder, saved = checkpoints.load_step(step)
        load_stage_state(folder, saved, state, recorder, num_steps)
        restore_updater(folder, updater)
    return state


def _save_checkpoint(
    checkpoints: Checkpoints, updater: PolicyUpdater, ranks: Ranks, loop: StageLoop
) -> None:
    """A checkpoint of all processes; none continues, or ends, before it is whole. Each machine has
    a folder for its parts.
    """
    parts = checkpoints.folder / f".parts-{ranks.node_rank}"
    if ranks.local_rank == 0:
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir(parents=True)
    ranks.wait_for_all()
    try:
        with raise_if_disk_full(parts):
            write_part(parts, updater)
            collect_parts(parts, updater)
    except DiskFullError:
        shutil.rmtree(parts, ignore_errors=True)
        raise
    ranks.wait_for_all()
    if ranks.rank == 0:
        with checkpoints.save_step(loop.state.step, loop.build_checkpoint_state()) as folder:
            _move_files(parts, folder)
    elif ranks.local_rank == 0:
        shutil.rmtree(parts)
    ranks.wait_for_all()


def _move_files(parts: Path, folder: Path) -> None:
    for path in parts.iterdir():
        path.replace(folder / path.name)


def _time_update(
    ctx: StageContext, updater: PolicyUpdater, part: BatchPart, ranks: Ranks, clock: Clock
) -> dict[str, float]:
    """The metrics of an optimiser step, and how long it took."""
    before = clock.seconds["training"]
    with clock.measure_phase("training"), generate_in_size(updater.policy.model, part.size):
        metrics = _update_policy(ctx, updater, part, ranks)
    seconds = clock.seconds["training"] - before
    images = sum(map(len, part.groups))
    speed = {"seconds/training": seconds, "ms_per_image/training": 1000 * seconds / images}
    return metrics | speed | {"epoch": part.epoch}


def _update_policy(
    ctx: StageContext, updater: PolicyUpdater, part: BatchPart, ranks: Ranks
) -> dict[str, float]:
    """One optimiser step of all processes, this one on its part of the batch."""
    kind = trainable_kind(ctx.config.hyper_parameters.kind)
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
    rows_per_sample = kind.rows_per_entry(ctx.config.hyper_parameters)
    passes = count_shared_micro_batches(
        part.groups, ranks.world, rows_per_sample, ctx.config.micro_batch
    )
    return updater.update_policy(batch, passes)


def _list_trainable_shards(
    ctx: StageContext, rollouts: list[Path], advantages: Path
) -> list[Shard]:
    """Every shard with its rows that have an advantage. All are joined at once: a join for each is
    quadratic in the samples.
    """
    keys = [read_columns(path, KEY) for path in rollouts]
    ends = np.cumsum([len(table) for table in keys])
    together = pa.concat_tables(keys)
    together = together.append_column("row", pa.array(np.arange(len(together))))
    found = together.join(read_table(advantages, ADVANTAGES), KEY, join_type="inner").sort_by("row")
    columns = [found[name].to_numpy() for name in ("row", *KEY, "advantage")]
    cuts = np.searchsorted(columns[0], ends[:-1])
    parts = zip(*(np.split(column, cuts) for column in columns), strict=True)
    return [
        _build_shard(ctx, path, rows - (end - len(table)), *rest)
        for path, table, end, (rows, *rest) in zip(rollouts, keys, ends, parts, strict=True)
    ]


def _build_shard(
    ctx: StageContext,
    path: Path,
    rows: np.ndarray,
    prompt_ids: np.ndarray,
    samples: np.ndarray,
    advantage: np.ndarray,
) -> Shard:
    groups = _select_groups(ctx, advantage, prompt_ids)
    return Shard(
        path,
        rows,
        prompt_ids,
        samples,
        advantage,
        len(groups),
        sum(map(len, groups)),
        read_image_size(ctx, path),
    )


def _select_groups(
    ctx: StageContext, advantage: np.ndarray, prompt_ids: np.ndarray
) -> SampleGroups:
    """Which samples of a shard stay together. Not kept with the shard: an array for every group is
    most of its memory.
    """
    return ctx.algorithm.select(
        advantage, np.ones(len(advantage), bool), prompt_ids, ctx.config.hyper_parameters
    )


def _drop_small_shards(shards: list[Shard], updater: PolicyUpdater, ranks: Ranks) -> list[Shard]:
    """The shards from which every process gets a group; the others are named in an alarm.

    Raises:
        TrainingError: there is something to learn from, and no shard of it is large enough.
    """
    large = [shard for shard in shards if shard.num_groups >= ranks.world]
    left_out = {
        shard.path.name: shard.num_groups for shard in shards if 0 < shard.num_groups < ranks.world
    }
    if not any(shard.num_groups for shard in shards):
        updater.alarms.append("nothing was learnt: no group has samples that score differently")
        warnings.warn(updater.alarms[-1], stacklevel=3)
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
        warnings.warn(updater.alarms[-1], stacklevel=3)
    return large


def _check_warmup(ctx: StageContext, num_steps: int) -> None:
    """Only now is it known: the steps follow from what was generated and scored. A stage without
    any has an alarm of its own.
    """
    if 0 < num_steps <= (warmup := ctx.config.optimizer.schedule.warmup):
        raise TrainingError(
            f"optimizer.schedule.warmup = {warmup} takes the whole stage of {num_steps} optimiser"
            f" steps; lower it, or raise 'epochs' = {ctx.offline_config.epochs}"
        )


def _open_parts(
    ctx: StageContext,
    model: Model,
    prompts: list[Prompt],
    shards: list[Shard],
    ranks: Ranks,
    of_rows: Ranks,
    done: int,
) -> Generator[BatchPart]:
    """This process's part of the batch of every optimiser step after those that are done. Prompts
    are encoded at once.

    Args:
        ranks: those that train, and ``row_ranks``, this one's number among those with rows of their
            own.
    """
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    wanted = dict.fromkeys(i for shard in shards for i in shard.prompt_ids.tolist())
    encode = (
        _encode_prompts_together(ctx, model, [by_id[i] for i in wanted], ranks) if wanted else None
    )
    loaded = _load_latents(_iterate_visits(ctx, shards, of_rows, done), of_rows)

    def iterate_parts() -> Generator[BatchPart]:
        with closing(loaded):
            for visit, batch, latents in loaded:
                assert encode, "there are samples, and so prompts"
                yield _build_part(ctx, visit, batch, latents, by_id, encode, of_rows)

    return iterate_parts()


def _encode_prompts_together(
    ctx: StageContext, model: Model, prompts: list[Prompt], ranks: Ranks
) -> Encode:
    """Encode every prompt once on each machine, each of its processes a share of them; all of these
    read the same files.
    """
    with ExitStack() as stack:
        process = broadcast_first_of_node(os.getpid())
        here = ranks.local_rank == 0
        folder = (
            stack.enter_context(open_scratch_folder(EMBEDDINGS))
            if here
            else path_of_scratch_folder(EMBEDDINGS, process)
        )
        ranks.wait_for_all()  # the first process of each machine has made the folder
        prompts = write_embeddings(
            model,
            prompts,
            folder,
            ctx.config.reference.needs_guidance,
            ranks.local_rank,
            ranks.ranks_per_node,
        )
        ranks.wait_for_all()
        embeddings = open_embeddings(folder, prompts)
        device = device_of(model)
        ranks.wait_for_all()  # all have opened the files, and the first process removes their names
    return lambda wanted: embeddings(wanted).to(device)


def _iterate_visits(
    ctx: StageContext, shards: list[Shard], ranks: Ranks, done: int = 0
) -> Iterator[ShardVisit]:
    """The batches of all optimiser steps but the first ``done``, a shard at a time.

    An epoch goes through the shards in a seeded order and shuffles inside each, so one shard is in
    memory at a time.
    """
    for epoch in range(ctx.offline_config.epochs):
        for index in _shuffle_indices(ctx.stage_seed, epoch, 0, len(shards)).tolist():
            shard = shards[index]
            skipped = min(done, _count_batches(shard, ctx.offline_config.batch_size, ranks))
            done -= skipped
            if skipped < _count_batches(shard, ctx.offline_config.batch_size, ranks):
                groups = _select_groups(ctx, shard.advantage, shard.prompt_ids)
                order = [
                    groups[i]
                    for i in _shuffle_indices(ctx.stage_seed, epoch, 1 + index, len(groups))
                ]
                batches = split_evenly(
                    order, _count_batches(shard, ctx.offline_config.batch_size, ranks)
                )
                yield ShardVisit(epoch, shard, batches[skipped:])


def _load_latents(
    visits: Iterator[ShardVisit], ranks: Ranks
) -> Generator[tuple[ShardVisit, SampleGroups, Tensor]]:
    """Every batch with this process's latents of it, [n, ...], which are freed with the batch.

    A thread reads a shard while the second half of the one before is trained on, so one and a half
    are in memory at most.
    """
    closed = threading.Event()

    def read_visit(visit: ShardVisit) -> list[Tensor]:
        rows = [
            visit.shard.rows[np.concatenate(shard_for_rank(batch, ranks))]
            for batch in visit.batches
        ]
        return read_latent_parts(visit.shard.path, rows, closed.is_set)

    with ThreadPoolExecutor(1, "read_shard") as reader:
        try:
            visit = next(visits, None)
            reading = reader.submit(read_visit, visit) if visit else None
            while visit and reading:
                latents = deque(reading.result())
                upcoming = next(visits, None)
                reading = None
                for batch in visit.batches:
                    if upcoming and not reading and 2 * (len(latents) - 1) < len(visit.batches):
                        reading = reader.submit(read_visit, upcoming)
                    yield visit, batch, latents.popleft()
                visit = upcoming
        finally:
            closed.set()  # a stage that was preempted must not wait for the rest of a shard


def _build_part(
    ctx: StageContext,
    visit: ShardVisit,
    batch: SampleGroups,
    latents: Tensor,
    prompts: dict[int, Prompt],
    encode: Encode,
    ranks: Ranks,
) -> BatchPart:
    """This process's part of a batch."""
    shard = visit.shard
    mine = shard_for_rank(batch, ranks)
    rows = np.concatenate(mine)
    keys = SampleKeys(ctx.stage_seed, shard.prompt_ids[rows].tolist(), shard.samples[rows].tolist())
    group_index = np.repeat(np.arange(len(mine)), [len(group_index) for group_index in mine])
    conditioning = encode([prompts[i] for i in keys.prompt_ids])
    advantage = torch.from_numpy(shard.advantage[rows])
    return BatchPart(
        visit.epoch, batch, keys, group_index, latents.float(), conditioning, advantage, shard.size
    )


def _count_batches(shard: Shard, batch_size: int, ranks: Ranks) -> int:
    """Equal batches of about ``batch_size`` samples, each with a group for every process: no small
    last one.
    """
    return min(math.ceil(shard.num_selected / batch_size), shard.num_groups // ranks.world)


def _shuffle_indices(seed: int, epoch: int, index: int, count: int) -> np.ndarray:
    return make_generator(
        seed, prompt_id=0, sample=epoch, step=index, stream=Stream.ORDER
    ).permutation(count)
