"""What the workers of an online stage do. They know nothing of where they run (``ebbflow.online.placement``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ebbflow.algorithms.advantages import PromptStatistics
from ebbflow.data.prompts import Prompt
from ebbflow.data.records import StageRecord
from ebbflow.models.base import device_of
from ebbflow.models.encoding import Embeddings, embed
from ebbflow.online import broadcast
from ebbflow.online.broadcast import BroadcastError
from ebbflow.online.learning import learn
from ebbflow.online.work import Generated, Lesson, Part, Scored, Trained, Watch
from ebbflow.rewards.combine import Scorer
from ebbflow.rollouts.engine import Engine
from ebbflow.rollouts.generate import Rollouts, join
from ebbflow.rollouts.parity import measure_parity
from ebbflow.rollouts.weights import Tensors, TransferError, WeightsVersion, bucketize, checksum
from ebbflow.stage import StageContext
from ebbflow.training.checkpoint import restore, write_part
from ebbflow.training.policy_io import save_policy
from ebbflow.training.policy_metadata import PolicyMetadata
from ebbflow.training.update import PolicyUpdater

KEPT = 2
"""Versions that are kept on both sides, with all that was sent of them: rollouts under way may be of the one before the last, and
a validation has weights of its own."""


class Generator:
    """A rollout worker: an engine, the version and the digest of the weights in it, and weights that were sent to it.

    Args:
        fetch: gets a bucket of weights from where ``WeightsVersion`` says it is.
    """

    def __init__(self, engine: Engine, worker: int = 0, fetch: Callable[[Any], Tensors] = lambda bucket: bucket) -> None:
        self.engine, self.fetch = engine, fetch
        self.holds: tuple[int, str] | None = None
        self.group: broadcast.Group | None = None
        self.sent: dict[str, WeightsVersion] = {}
        self.watch = Watch("rollout", worker)

    def generate(self, part: Part, weights: WeightsVersion) -> tuple[Rollouts, np.ndarray, Generated]:
        """(rollouts on the CPU, images, what to know about them); new weights are received and checked first."""
        received = self._receive(weights, part.step)
        with self.watch.task(part.task, part.step, part.traced):
            conditioning = part.conditioning.rows(torch.from_numpy(part.sample_index))
            rollouts, images = self.engine.generate(conditioning, part.keys, part.sampler, part.plan)
        report = Generated(weights.version, received, rollouts.finite, self.watch.told())
        return rollouts.to(torch.device("cpu")), images, report

    def join(self, address: str, port: int, name: str, rank: int, world: int, timeout: float) -> None:
        """Join those that weights are sent to, under a name that is new; see ``broadcast.join``."""
        self.leave()
        self.group = broadcast.join(address, port, name, rank, world, timeout)

    def leave(self) -> None:
        """Let go of the group, if there is one."""
        if self.group is not None:
            broadcast.leave(self.group)
            self.group = None

    def receive(self, expected: Tensors) -> WeightsVersion:
        """Take part in ``Trainer.broadcast``; may run beside ``generate``, which loads what it was sent when it is told to.

        Args:
            expected: ``Trainer.expected``.

        Raises:
            TransferError, BroadcastError: as ``broadcast.receive``.
        """
        weights, tensors = broadcast.receive(_joined(self.group), expected)
        self.sent = _newest(self.sent, replace(weights, buckets=(tensors,)))
        return weights

    def close(self) -> None:
        self.engine.close()

    def _receive(self, weights: WeightsVersion, step: int) -> float:
        """Seconds that it took."""
        if not weights.digest or (weights.version, weights.digest) == self.holds:
            return 0.0
        with self.watch.task("receive", step):
            self.engine.load(self._find(weights))
            self.holds = weights.version, weights.digest
        return self.watch.busy[-1].seconds

    def _find(self, weights: WeightsVersion) -> Tensors:
        """Weights that were sent to this worker, and otherwise those of the buckets."""
        if weights.digest in self.sent:
            return self.sent[weights.digest].buckets[0]
        if not weights.buckets:
            raise TransferError(
                f"rollout worker {self.watch.worker} was not sent the weights of version {weights.version} "
                f"({weights.digest[:12]}), as one that was replaced: give it their buckets (Trainer.resend)"
            )
        return weights.receive(self.fetch)


class Judge:
    """A reward worker."""

    def __init__(self, scorer: Scorer, worker: int = 0) -> None:
        self.scorer = scorer
        self.watch = Watch("reward", worker)

    def score(
        self, images: np.ndarray, prompts: Sequence[Prompt], step: int, guardrails: bool = False, traced: bool = False
    ) -> Scored:
        """The scores of images, each against its prompt; ``guardrails`` too, for a validation, or what is trained on alone."""
        with self.watch.task("validation" if guardrails else "scoring", step, traced):
            scorer = self.scorer if guardrails else replace(self.scorer, guardrails=())
            table = scorer(images, prompts)
        return Scored(table, self.watch.told())


class Trainer:
    """A rank of the training group; every method is called on all of them, with the same arguments."""

    def __init__(self, ctx: StageContext, updater: PolicyUpdater, metadata: PolicyMetadata | None = None, rank: int = 0) -> None:
        """``metadata``: of the policy folder that the stage starts from."""
        self.ctx, self.updater, self.metadata, self.rank = ctx, updater, metadata, rank
        self.watch = Watch("training", rank)
        self.store: Any = None
        self.group: broadcast.Group | None = None
        self.sent: dict[str, WeightsVersion] = {}

    def encode(self, prompts: Iterable[Prompt]) -> Embeddings:
        """Every different prompt, once."""
        return embed(self.updater.policy.model, prompts)

    def train(self, lesson: Lesson, *rollouts: Rollouts) -> Trained:
        """The updates of a step on the rollouts of all its parts."""
        with self.watch.task("training", lesson.step, lesson.traced):
            metrics = learn(self.ctx, self.updater, lesson, join(rollouts))
            self.updater.finish_step()
        return Trained(metrics, self.updater.updates, self.updater.alarms, self.watch.told())

    def publish(self, version: int, copy: str | None = None) -> WeightsVersion:
        """The weights that generate from now on: whole, on the CPU of the first rank; the others only take part in gathering.

        ``copy``: of the policy; left out, the one that the algorithm's rollouts are of.
        """
        policy = self.updater.policy
        generates = copy or self.updater.algorithm.generates
        values = policy.parameters if generates == "current" else policy.copies[generates]
        whole: Tensors = {}
        for name in policy.parameters:  # in their order, for a copy that was read from a file has another
            value = values[name]  # one at a time: no rank of a sharded model has room for all of it on its device
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if self.rank == 0:
                whole[name] = full.detach().to("cpu", copy=True)
        if self.rank > 0:
            return WeightsVersion(version)
        return WeightsVersion(version, checksum(whole), tuple(bucketize(whole)), sum(value.nbytes for value in whole.values()))

    def serve(self, address: str) -> int:
        """Let rollout workers meet the first rank, at an address that they reach this machine by: the port."""
        self.store = broadcast.serve(address)
        return int(self.store.port)

    def join(self, address: str, port: int, name: str, world: int, timeout: float) -> None:
        """Join those that weights are sent to, the first rank alone; they are its rank 0. See ``broadcast.join``."""
        self.leave()
        self.group = broadcast.join(address, port, name, 0, world, timeout) if self.rank == 0 else None

    def abort(self, name: str) -> None:
        """Let nobody wait any longer for the members of a group, one of which is gone; may run beside ``join`` and all else."""
        broadcast.abort(self.store, name)
        self.leave()

    def leave(self) -> None:
        """Let go of the group, if there is one."""
        if self.group is not None:
            broadcast.leave(self.group)
            self.group = None

    def expected(self) -> Tensors:
        """Shapes and types of the weights, by name."""
        return broadcast.specs(self.updater.policy.parameters)

    def broadcast(self, version: int, copy: str | None = None) -> WeightsVersion:
        """Send what ``publish`` gives to all rollout workers, which take part in ``Generator.receive``; without buckets.

        Raises:
            BroadcastError: a worker does not take part; the weights can still be had (``resend``).
        """
        group = self.group  # as it is now: while the weights are gathered the group may be called off
        weights = Trainer.publish(self, version, copy)  # the tensors themselves, wherever a subclass puts them
        if self.rank == 0:
            self.sent = _newest(self.sent, weights)
            broadcast.send(_joined(group), weights)
        return replace(weights, buckets=())

    def resend(self, digest: str | None = None) -> WeightsVersion:
        """Weights that were sent not long ago, with their buckets, for a worker that lacks them; left out, the last ones.

        May run beside everything else.

        Raises:
            TransferError: they are no longer kept.
        """
        digest = digest or list(self.sent)[-1]
        if digest not in self.sent:
            raise TransferError(
                f"the weights {digest[:12]} are of a version that is not among the {KEPT} that were sent last: "
                "generate with newer ones"
            )
        return self.sent[digest]

    def save(self, folder: Path, record: StageRecord, history: PromptStatistics) -> None:
        """Write the policy folder that the stage leaves behind."""
        assert self.metadata is not None
        save_policy(self.ctx, self.updater, self.metadata, record, folder, write=self.rank == 0, history=history)

    def measure(self, part: Part, rollouts: Rollouts) -> dict[str, float]:
        """How far the samples of another engine are from the policy that rollouts are of (``ebbflow.rollouts.parity``)."""
        policy = self.updater.policy
        device = device_of(policy.model)
        conditioning = part.conditioning.rows(torch.from_numpy(part.sample_index)).to(device)
        trajectory = rollouts.to(device).trajectory
        assert trajectory is not None, "the gate's samples are recorded"
        with policy.using(self.updater.algorithm.generates):
            return measure_parity(
                policy, trajectory, conditioning, part.keys, part.sampler, self.ctx.online.parity, self.ctx.config.micro_batch
            )

    def checkpoint(self, folder: Path) -> None:
        """Write this rank's part of where training stands into a folder."""
        write_part(folder, self.updater)

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint."""
        restore(checkpoint, self.updater)


def _newest(known: dict[str, WeightsVersion], new: WeightsVersion) -> dict[str, WeightsVersion]:
    """What is kept of what was sent, the newest last; a new dictionary, for others may be reading the old one."""
    kept = {digest: old for digest, old in known.items() if 0 <= new.version - old.version < KEPT and digest != new.digest}
    return kept | {new.digest: new}


def _joined(group: broadcast.Group | None) -> broadcast.Group:
    if group is None:
        raise BroadcastError(f"there is no group, or it was called off: {broadcast.WAY_OUT}")
    return group
