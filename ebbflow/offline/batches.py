"""What each optimiser step of an offline stage trains on: the rows of the shards that have an
advantage, in a seeded order, and their latents, read ahead by a thread.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ebbflow.data.prompt_windows import PromptWindow, split_into_windows
from ebbflow.data.prompts import Prompt
from ebbflow.data.schema import ADVANTAGES, KEY
from ebbflow.flow.noise import SampleKeys
from ebbflow.models import Conditioning, Model
from ebbflow.models.base import Size, device_of
from ebbflow.models.encoding import PromptWindows
from ebbflow.offline.shards import read_image_size, read_latent_parts
from ebbflow.seeding import Stream, make_generator
from ebbflow.stage import StageContext
from ebbflow.storage.tables import read_columns, read_table
from ebbflow.training.batches import SampleGroups, shard_for_rank
from ebbflow.training.distributed import Ranks
from ebbflow.training.shared_prompts import encode_windows_together


@dataclass(frozen=True)
class Shard:
    """The rows of a rollout shard that are worth training on: row numbers, keys and advantages, and
    how many groups they make.

    Example: of a shard of 24 rows, two samples for each prompt, 19 have an advantage::

        shard.rows  # array([1, 2, 3, 4, 6, ...]), int64 [19]
        shard.prompt_ids  # array([0, 1, 1, 2, 3, ...]), of these rows
        shard.num_groups  # 19, where every sample is a group of its own
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
    """A shard in an epoch, and the batches of its samples that are trained on then, as positions in
    the shard's arrays.

    Attributes:
        number: of the visit, from zero, over all epochs.
    """

    number: int
    epoch: int
    shard: Shard
    batches: list[SampleGroups]


@dataclass(frozen=True)
class BatchPart:
    """One process's part of a batch: a row per sample.

    Example: rank 1 of 2, of a batch of three pairs (six samples)::

        part.groups  # [array([4, 5]), array([0, 1]), array([8, 9])], the same on both ranks
        part.group_index  # array([0, 0]): the third pair is this rank's
        part.clean  # fp32 (2, C, H, W)

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


def find_samples_of_step(
    ctx: StageContext, rollouts: list[Path], advantages: Path, step: int, processes: int
) -> tuple[Path, np.ndarray, np.ndarray] | None:
    """Find what an optimiser step trains on, over all processes: (shard, row numbers [N],
    advantages [N]); None after the last step.

    Args:
        step: from zero.
        processes: that train together, those that share tokens counted once. They decide how the
            samples are divided.
    """
    shards = [
        shard
        for shard in list_trainable_shards(ctx, rollouts, advantages)
        if shard.num_groups >= processes
    ]
    visit = next(_iterate_visits(ctx, shards, Ranks(0, processes), num_done=step), None)
    if visit is None:
        return None
    rows = np.concatenate(visit.batches[0])
    return visit.shard.path, visit.shard.rows[rows], visit.shard.advantage[rows]


def list_trainable_shards(ctx: StageContext, rollouts: list[Path], advantages: Path) -> list[Shard]:
    """List every shard with its rows that have an advantage."""
    keys = [read_columns(path, KEY) for path in rollouts]
    ends = np.cumsum([len(table) for table in keys])
    # All shards are joined with the advantages at once: a join for each would read every advantage
    # as often as there are shards, which is quadratic in the samples. ``row`` is the number of a
    # row in all shards together; a join keeps no order, so the result is sorted by it.
    together = pa.concat_tables(keys)
    together = together.append_column("row", pa.array(np.arange(len(together))))
    joined = together.join(read_table(advantages, ADVANTAGES), KEY, join_type="inner")
    joined = joined.sort_by("row")
    columns = [joined[name].to_numpy() for name in ("row", *KEY, "advantage")]
    cuts = np.searchsorted(columns[0], ends[:-1])
    parts = zip(*(np.split(column, cuts) for column in columns), strict=True)
    shards = []
    for path, table, end, part in zip(rollouts, keys, ends, parts, strict=True):
        rows, prompt_ids, samples, advantage = part
        groups = _select_groups(ctx, advantage, prompt_ids)
        shards.append(
            Shard(
                path=path,
                rows=rows - (end - len(table)),
                prompt_ids=prompt_ids,
                samples=samples,
                advantage=advantage,
                num_groups=len(groups),
                num_selected=sum(map(len, groups)),
                size=read_image_size(ctx, path),
            )
        )
    return shards


def _select_groups(
    ctx: StageContext, advantage: np.ndarray, prompt_ids: np.ndarray
) -> SampleGroups:
    """Select the samples of a shard to train on, and which of them stay together."""
    # Computed again for each visit and not kept with the shard: an array for every group would be
    # most of its memory.
    return ctx.algorithm.select(
        advantage, np.ones(len(advantage), bool), prompt_ids, ctx.config.hyper_parameters
    )


def open_batch_parts(
    ctx: StageContext,
    model: Model,
    prompts: list[Prompt],
    shards: list[Shard],
    row_ranks: Ranks,
    num_done: int,
) -> Generator[BatchPart]:
    """Encode the first prompts, and return an iterator over this process's part of the batch of
    every optimiser step after the first ``num_done``. It encodes further prompts before the first
    step of the shards that have them, and all processes of the group iterate together.

    Close it when a stage ends early: that stops the thread which reads ahead.

    Args:
        row_ranks: this process among those with rows of their own (``Ranks.row_ranks``).
    """
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    embeddings = PromptWindows(_list_windows(ctx, shards, by_id), ctx.config.negative_gradient)

    def encode_visit(visit: ShardVisit) -> None:
        # A visit whose window is the one before costs nothing: most stages have one window.
        steps = range(visit.number, visit.number + 1)
        encode_windows_together(model, embeddings, steps, ctx.config.reference.needs_guidance)

    visits = _iterate_visits(ctx, shards, row_ranks, num_done)
    first = next(visits, None)
    if first:
        # Here and not in the generator, so that the first step does not take the time of it: the
        # budget of a stage expects that each step takes as long as the longest so far.
        encode_visit(first)
        visits = chain([first], visits)
    loaded = _load_latents(visits, row_ranks)
    device = device_of(model)

    def iterate_parts() -> Generator[BatchPart]:
        with closing(loaded):
            for visit, batch, latents in loaded:
                # All ranks are here at the same time: the encoding is a collective call.
                encode_visit(visit)
                shard = visit.shard
                groups = shard_for_rank(batch, row_ranks)
                rows = np.concatenate(groups)
                keys = _build_keys(ctx, shard, rows)
                yield BatchPart(
                    epoch=visit.epoch,
                    groups=batch,
                    keys=keys,
                    group_index=np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
                    clean=latents.float(),  # stored in ``latent_precision``
                    conditioning=embeddings(
                        visit.number,
                        _choose_captions(ctx, [by_id[i] for i in keys.prompt_ids], visit.epoch),
                    ).to(device),
                    advantage=torch.from_numpy(shard.advantage[rows]),
                    size=shard.size,
                )

    return iterate_parts()


def _build_keys(ctx: StageContext, shard: Shard, rows: np.ndarray) -> SampleKeys:
    prompt_ids = shard.prompt_ids[rows].tolist()
    return SampleKeys(ctx.stage_seed, prompt_ids, shard.samples[rows].tolist())


def _list_windows(
    ctx: StageContext, shards: Sequence[Shard], by_id: Mapping[int, Prompt]
) -> list[PromptWindow]:
    """List the runs of visits whose prompts are encoded together."""
    order = [index for _, index in _order_visits(ctx, len(shards))]
    ids = [dict.fromkeys(shard.prompt_ids.tolist()) for shard in shards]
    windows = []
    for steps in split_into_windows(ids[index] for index in order):
        # In the order of the shards and not of the visits: a stage of one window encodes the same
        # batches whatever the seed, and rows that are beside each other round alike.
        visited = sorted({order[step] for step in steps})
        prompts = [by_id[i] for i in dict.fromkeys(chain.from_iterable(ids[v] for v in visited))]
        if ctx.offline_config.data is not None:
            prompts += list(map(drop_caption, prompts))
        windows.append(PromptWindow(steps, partial(list, prompts)))
    return windows


def drop_caption(prompt: Prompt) -> Prompt:
    """Return a prompt without its text, for the network's prediction without a caption."""
    return replace(prompt, prompt="")


def _choose_captions(ctx: StageContext, prompts: list[Prompt], epoch: int) -> list[Prompt]:
    """Drop a share of the captions, where the stage trains on captioned data."""
    data = ctx.offline_config.data
    if data is None or not data.caption_dropout:
        return prompts
    # By picture and epoch, so that neither batches nor processes change which are dropped.
    draws = [
        make_generator(ctx.stage_seed, prompt.prompt_id, epoch, 0, Stream.CAPTIONS).random()
        for prompt in prompts
    ]
    return [
        drop_caption(prompt) if draw < data.caption_dropout else prompt
        for prompt, draw in zip(prompts, draws, strict=True)
    ]


def _iterate_visits(
    ctx: StageContext, shards: list[Shard], ranks: Ranks, num_done: int = 0
) -> Iterator[ShardVisit]:
    """Iterate over the batches of all optimiser steps but the first ``num_done``, a shard at a
    time.

    An epoch goes through the shards in a seeded order and shuffles inside each, so one shard is in
    memory at a time.
    """
    batch_size = ctx.offline_config.batch_size
    for number, (epoch, index) in enumerate(_order_visits(ctx, len(shards))):
        shard = shards[index]
        num_batches = count_batches(shard, batch_size, ranks)
        # A stage that resumes passes over whole shards without selecting or shuffling: every order
        # has a generator of its own, so nothing has to be replayed.
        num_skipped = min(num_done, num_batches)
        num_done -= num_skipped
        if num_skipped == num_batches:
            continue
        groups = _select_groups(ctx, shard.advantage, shard.prompt_ids)
        order = _shuffle_indices(ctx.stage_seed, epoch, 1 + index, len(groups))
        batches = [[groups[i] for i in part] for part in np.array_split(order, num_batches)]
        yield ShardVisit(number, epoch, shard, batches[num_skipped:])


def _order_visits(ctx: StageContext, num_shards: int) -> Iterator[tuple[int, int]]:
    """Iterate over the visits of all epochs: (epoch, index of the shard)."""
    for epoch in range(ctx.offline_config.epochs):
        for index in _shuffle_indices(ctx.stage_seed, epoch, 0, num_shards).tolist():
            yield epoch, index


def _load_latents(
    visits: Iterator[ShardVisit], ranks: Ranks
) -> Generator[tuple[ShardVisit, SampleGroups, Tensor]]:
    """Iterate over the batches with this process's latents of each, [n, ...], which are freed with
    the batch.

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
                next_visit = next(visits, None)
                reading = None
                for batch in visit.batches:
                    # Half of the shard is freed: read the next one, beside the other half.
                    is_half_done = 2 * (len(latents) - 1) < len(visit.batches)
                    if next_visit and not reading and is_half_done:
                        reading = reader.submit(read_visit, next_visit)
                    # Popped, so that nothing here holds the latents while they are trained on.
                    yield visit, batch, latents.popleft()
                visit = next_visit
        finally:
            closed.set()  # a stage that was preempted must not wait for the rest of a shard


def count_batches(shard: Shard, batch_size: int, ranks: Ranks) -> int:
    """Count the batches of a shard: equal ones of about ``batch_size`` samples, with no small last
    one, each with a group for every process.
    """
    return min(math.ceil(shard.num_selected / batch_size), shard.num_groups // ranks.world)


def _shuffle_indices(seed: int, epoch: int, index: int, count: int) -> np.ndarray:
    # Index 0 is the order of the shards in an epoch, 1 + i that of the groups of shard i.
    return make_generator(
        seed, prompt_id=0, sample=epoch, step=index, stream=Stream.ORDER
    ).permutation(count)
