"""What the workers of an online stage do. They know nothing of where they run (``ebbflow.online.placement``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ebbflow.algorithms.advantages import PromptStatistics
from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import Stream, generator
from ebbflow.models import Conditioning
from ebbflow.models.encoding import Embeddings, embed
from ebbflow.online.weights import Tensors, Weights, checksum, in_buckets
from ebbflow.online.work import Generated, Lesson, Part, Scored, Trained, Watch
from ebbflow.recipe.algorithms import ForwardConfig
from ebbflow.records import StageRecord
from ebbflow.rewards.combine import Scorer
from ebbflow.rollouts.engine import Engine
from ebbflow.rollouts.generate import Rollouts, join
from ebbflow.stage import Place, save_policy
from ebbflow.training.anchor import corrected
from ebbflow.training.batches import Corrected, TermBatch, forward_batch, micro_batches, trajectory_batch
from ebbflow.training.policy import PolicyCard
from ebbflow.training.update import Learner


class Generator:
    """A rollout worker: an engine, and the version of the weights in it.

    Args:
        fetch: gets a bucket of weights from where ``Weights`` says it is.
    """

    def __init__(self, engine: Engine, worker: int = 0, fetch: Callable[[Any], Tensors] = lambda bucket: bucket) -> None:
        self.engine, self.fetch = engine, fetch
        self.version: int | None = None
        self.watch = Watch("rollout", worker)

    def generate(self, part: Part, weights: Weights) -> tuple[Rollouts, np.ndarray, Generated]:
        """(rollouts on the CPU, images, what to know about them); new weights are received and checked first."""
        received = self._receive(weights, part.step)
        with self.watch.task("rollout", part.step):
            conditioning = part.conditioning.rows(torch.from_numpy(part.owner))
            rollouts, images = self.engine.generate(conditioning, part.keys, part.sampler, part.plan)
        return rollouts.to(torch.device("cpu")), images, Generated(weights.version, received, self.watch.told())

    def close(self) -> None:
        self.engine.close()

    def _receive(self, weights: Weights, step: int) -> float:
        """Seconds that it took."""
        if not weights.digest or weights.version == self.version:
            return 0.0
        with self.watch.task("receive", step):
            self.engine.load(weights.receive(self.fetch))
            self.version = weights.version
        return self.watch.busy[-1].seconds


class Judge:
    """A reward worker."""

    def __init__(self, scorer: Scorer, worker: int = 0) -> None:
        self.scorer = scorer
        self.watch = Watch("reward", worker)

    def score(self, images: np.ndarray, prompts: Sequence[Prompt], step: int, guards: bool = False) -> Scored:
        """The scores of images, each against its prompt; ``guards`` too, or what is trained on alone."""
        with self.watch.task("scoring", step):
            scorer = self.scorer if guards else replace(self.scorer, guards=())
            table = scorer(images, prompts)
        return Scored(table, self.watch.told())


class Trainer:
    """A rank of the training group; every method is called on all of them, with the same arguments."""

    def __init__(self, place: Place, learner: Learner, card: PolicyCard | None = None, rank: int = 0) -> None:
        """``card``: of the policy folder that the stage starts from."""
        self.place, self.learner, self.card, self.rank = place, learner, card, rank
        self.watch = Watch("training", rank)

    def encode(self, prompts: Iterable[Prompt]) -> Embeddings:
        """Every different prompt, once."""
        return embed(self.learner.policy.model, prompts)

    def train(self, lesson: Lesson, *rollouts: Rollouts) -> Trained:
        """The updates of a step on the rollouts of all its parts."""
        with self.watch.task("training", lesson.step):
            metrics = self._updates(lesson, join(rollouts).to(self._device))
            self.learner.finish_step()
        return Trained(metrics, self.learner.updates, self.learner.alarms, self.watch.told())

    def publish(self, version: int) -> Weights:
        """The weights that generate from now on, on the CPU."""
        policy = self.learner.policy
        generates = self.learner.algorithm.generates
        values = policy.parameters if generates == "current" else policy.copies[generates]
        whole = {name: value.detach().cpu().clone() for name, value in values.items()}
        buckets = tuple(in_buckets(whole))
        return Weights(version, checksum(whole), buckets, sum(value.nbytes for value in whole.values()))

    def save(self, folder: Path, record: StageRecord, history: PromptStatistics) -> None:
        """Write the policy folder that the stage leaves behind."""
        assert self.card is not None
        save_policy(self.place, self.learner, self.card, record, folder, write=self.rank == 0, history=history)

    @property
    def _device(self) -> torch.device:
        return next(self.learner.policy.model.transformer.parameters()).device

    def _updates(self, lesson: Lesson, rollouts: Rollouts) -> dict[str, float]:
        """The metrics of all updates, averaged."""
        conditioning = lesson.conditioning.to(self._device).rows(torch.from_numpy(lesson.owner))
        rollout: Corrected | None = None
        metrics: dict[str, float] = {}
        if rollouts.trajectory is not None:
            rollout, metrics = corrected(self.learner.policy, self.place.config, rollouts.trajectory, conditioning, lesson.keys)
        taken: list[dict[str, float]] = []
        for units in self._split(lesson):
            batch = self._terms(lesson, rollouts, conditioning, rollout, units)
            if len(batch.points):
                taken.append(self.learner.update(batch, micro_batches(batch.unit, self.place.config.micro_batch)))
        first = {"ratio/first_deviation": taken[0]["ratio/deviation"]} if taken and "ratio/deviation" in taken[0] else {}
        return metrics | _averages(taken) | first

    def _split(self, lesson: Lesson) -> list[list[np.ndarray]]:
        """The algorithm's units, shuffled and dealt out over the updates of a step; fewer parts when there are too few."""
        place, prompt_ids = self.place, np.array(lesson.keys.prompt_ids)
        units = place.algorithm.select(lesson.advantages, lesson.keep, prompt_ids, place.config.hyper)
        order = generator(place.seed, prompt_id=0, sample=lesson.step, step=0, stream=Stream.ORDER).permutation(len(units))
        return [[units[i] for i in part] for part in np.array_split(order, place.online.updates_per_step) if len(part)]

    def _terms(
        self,
        lesson: Lesson,
        rollouts: Rollouts,
        conditioning: Conditioning,
        rollout: Corrected | None,
        units: list[np.ndarray],
    ) -> TermBatch:
        """The terms of some units of a step's samples."""
        place, chosen = self.place, np.concatenate(units)
        samples = torch.from_numpy(chosen).to(rollouts.latents.device)
        keys, conditioning = lesson.keys.take(chosen), conditioning.rows(samples)
        advantage: Tensor = torch.from_numpy(lesson.advantages).to(samples.device)[samples]
        if rollout is not None:
            return trajectory_batch(rollout.take(samples), conditioning, advantage, keys, place.config.sampler)
        hyper = place.config.hyper
        assert isinstance(hyper, ForwardConfig)
        unit = np.repeat(np.arange(len(units)), [len(unit) for unit in units])
        return forward_batch(rollouts.latents[samples], conditioning, advantage, keys, unit, hyper, visit=0)


def _averages(updates: list[dict[str, float]]) -> dict[str, float]:
    """Means over the updates of a step; each metric over the updates that have it."""
    names = dict.fromkeys(name for update in updates for name in update)
    return {name: fmean(update[name] for update in updates if name in update) for name in names}
