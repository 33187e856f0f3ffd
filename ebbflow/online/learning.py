"""What a rank of the training group learns from the rollouts of a step: its updates, one after another.

The units of an update are dealt out over the ranks; what several ranks learn is what one would, up to rounding.
"""

from __future__ import annotations

from statistics import fmean

import numpy as np
import torch

from ebbflow.models import Conditioning
from ebbflow.models.base import device_of
from ebbflow.online.work import Lesson
from ebbflow.recipe.algorithms import ForwardConfig
from ebbflow.rollouts.generate import Rollouts
from ebbflow.seeding import Stream, generator
from ebbflow.stage import StageContext
from ebbflow.training.batches import (
    CorrectedRollout,
    RowBatch,
    SampleGroups,
    forward_batch,
    num_micro_batches,
    shard_for_rank,
    split_evenly,
    trajectory_batch,
)
from ebbflow.training.distributed import Ranks
from ebbflow.training.rollout_correction import apply_rollout_correction
from ebbflow.training.update import PolicyUpdater


def learn(ctx: StageContext, updater: PolicyUpdater, lesson: Lesson, rollouts: Rollouts) -> dict[str, float]:
    """The metrics of all updates, averaged, and how many were not taken because nothing was left to learn from."""
    conditioning = lesson.conditioning.to(device_of(updater.policy.model))
    rollout: CorrectedRollout | None = None
    metrics: dict[str, float] = {}
    if rollouts.trajectory is not None:
        sample_index = torch.from_numpy(lesson.sample_index)
        rollout, metrics = apply_rollout_correction(
            updater.policy, ctx.config, rollouts.trajectory, conditioning, lesson.keys, sample_index
        )
    taken: list[dict[str, float]] = []
    for groups in _split(ctx, lesson):
        if left := groups if rollout is None else rollout.kept(np.concatenate(groups)):
            batch = _rows(ctx, lesson, rollouts, conditioning, rollout, shard_for_rank(left, Ranks.current()))
            taken.append(_update(ctx, updater, batch, left))
    first = {"ratio/first_deviation": taken[0]["ratio/deviation"]} if taken and "ratio/deviation" in taken[0] else {}
    return metrics | _averages(taken) | first | {"skipped_updates": ctx.online.updates_per_step - len(taken)}


def _split(ctx: StageContext, lesson: Lesson) -> list[SampleGroups]:
    """The algorithm's units, shuffled and dealt out over the updates of a step; fewer parts when there are too few."""
    prompt_ids = np.array(lesson.keys.prompt_ids)
    groups = ctx.algorithm.select(lesson.advantages, lesson.keep, prompt_ids, ctx.config.hyper)
    order = generator(ctx.seed, prompt_id=0, sample=lesson.step, step=0, stream=Stream.ORDER).permutation(len(groups))
    return [part for part in split_evenly([groups[i] for i in order], ctx.online.updates_per_step) if part]


def _rows(
    ctx: StageContext,
    lesson: Lesson,
    rollouts: Rollouts,
    conditioning: Conditioning,
    rollout: CorrectedRollout | None,
    groups: SampleGroups,
) -> RowBatch:
    """The terms of some units: of samples, or of trajectories' single terms."""
    numbers, device = np.concatenate(groups), conditioning.device
    samples, part = (numbers, None) if rollout is None else rollout.only(numbers)
    keys, conditioning = lesson.keys.take(samples), conditioning.rows(torch.from_numpy(lesson.sample_index[samples]))
    advantage = torch.from_numpy(lesson.advantages[samples]).to(device)
    if part is not None:
        return trajectory_batch(part.to(device), conditioning, advantage, keys, ctx.config.sampler)
    hyper = ctx.config.hyper
    assert isinstance(hyper, ForwardConfig)
    group_index = np.repeat(np.arange(len(groups)), [len(group_index) for group_index in groups])
    return forward_batch(rollouts.latents[samples].to(device), conditioning, advantage, keys, group_index, hyper, visit=0)


def _update(ctx: StageContext, updater: PolicyUpdater, batch: RowBatch, groups: SampleGroups) -> dict[str, float]:
    """One optimiser step of all ranks on some units, this one on its share."""
    world, config = Ranks.current().world, ctx.config
    draws = config.hyper.noise_levels if isinstance(config.hyper, ForwardConfig) else 1
    metrics = updater.update(batch, num_micro_batches(groups, world, draws, config.micro_batch))
    if len(groups) < world and "grad_variance" in metrics:  # every rank had all of them, and each counted as another term
        metrics["grad_variance"] /= world
    return metrics


def _averages(updates: list[dict[str, float]]) -> dict[str, float]:
    """Means over the updates of a step; each metric over the updates that have it."""
    names = dict.fromkeys(name for update in updates for name in update)
    return {name: fmean(update[name] for update in updates if name in update) for name in names}
