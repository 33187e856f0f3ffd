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
from ebbflow.stage import Place
from ebbflow.training.anchor import corrected
from ebbflow.training.batches import Corrected, TermBatch, Units, deal, forward_batch, share, shared_passes, trajectory_batch
from ebbflow.training.distributed import Ranks
from ebbflow.training.update import Learner


def learn(place: Place, learner: Learner, lesson: Lesson, rollouts: Rollouts) -> dict[str, float]:
    """The metrics of all updates, averaged, and how many were not taken because nothing was left to learn from."""
    conditioning = lesson.conditioning.to(device_of(learner.policy.model))
    rollout: Corrected | None = None
    metrics: dict[str, float] = {}
    if rollouts.trajectory is not None:
        owner = torch.from_numpy(lesson.owner)
        rollout, metrics = corrected(learner.policy, place.config, rollouts.trajectory, conditioning, lesson.keys, owner)
    taken: list[dict[str, float]] = []
    for units in _split(place, lesson):
        if left := units if rollout is None else rollout.kept(np.concatenate(units)):
            batch = _terms(place, lesson, rollouts, conditioning, rollout, share(left, Ranks.current()))
            taken.append(_update(place, learner, batch, left))
    first = {"ratio/first_deviation": taken[0]["ratio/deviation"]} if taken and "ratio/deviation" in taken[0] else {}
    return metrics | _averages(taken) | first | {"skipped_updates": place.online.updates_per_step - len(taken)}


def _split(place: Place, lesson: Lesson) -> list[Units]:
    """The algorithm's units, shuffled and dealt out over the updates of a step; fewer parts when there are too few."""
    prompt_ids = np.array(lesson.keys.prompt_ids)
    units = place.algorithm.select(lesson.advantages, lesson.keep, prompt_ids, place.config.hyper)
    order = generator(place.seed, prompt_id=0, sample=lesson.step, step=0, stream=Stream.ORDER).permutation(len(units))
    return [part for part in deal([units[i] for i in order], place.online.updates_per_step) if part]


def _terms(
    place: Place, lesson: Lesson, rollouts: Rollouts, conditioning: Conditioning, rollout: Corrected | None, units: Units
) -> TermBatch:
    """The terms of some units: of samples, or of trajectories' single terms."""
    numbers, device = np.concatenate(units), conditioning.device
    samples, part = (numbers, None) if rollout is None else rollout.only(numbers)
    keys, conditioning = lesson.keys.take(samples), conditioning.rows(torch.from_numpy(lesson.owner[samples]))
    advantage = torch.from_numpy(lesson.advantages[samples]).to(device)
    if part is not None:
        return trajectory_batch(part.to(device), conditioning, advantage, keys, place.config.sampler)
    hyper = place.config.hyper
    assert isinstance(hyper, ForwardConfig)
    unit = np.repeat(np.arange(len(units)), [len(unit) for unit in units])
    return forward_batch(rollouts.latents[samples].to(device), conditioning, advantage, keys, unit, hyper, visit=0)


def _update(place: Place, learner: Learner, batch: TermBatch, units: Units) -> dict[str, float]:
    """One optimiser step of all ranks on some units, this one on its share."""
    world, config = Ranks.current().world, place.config
    draws = config.hyper.noise_levels if isinstance(config.hyper, ForwardConfig) else 1
    metrics = learner.update(batch, shared_passes(units, world, draws, config.micro_batch))
    if len(units) < world and "grad_variance" in metrics:  # every rank had all of them, and each counted as another term
        metrics["grad_variance"] /= world
    return metrics


def _averages(updates: list[dict[str, float]]) -> dict[str, float]:
    """Means over the updates of a step; each metric over the updates that have it."""
    names = dict.fromkeys(name for update in updates for name in update)
    return {name: fmean(update[name] for update in updates if name in update) for name in names}
