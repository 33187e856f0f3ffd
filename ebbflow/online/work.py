"""What the roles of an online stage hand to each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan
from ebbflow.models import Conditioning
from ebbflow.online.profiling import profiled
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.online import Role
from ebbflow.rewards.combine import ScoreTable


@dataclass(frozen=True)
class Part:
    """Samples that a rollout worker generates at a time: whole groups of one step, about a micro-batch.

    Attributes:
        step: whose rollouts they are, from zero.
        prompts: [N], of every sample.
        conditioning: on the CPU, a row for each different prompt in their order; large, so it is repeated where it is used.
        owner: integer [N], the row of each sample.
        plan: of the step.
        task: what the worker's time goes under.
        traced: whether to profile it.
    """

    step: int
    prompts: list[Prompt]
    conditioning: Conditioning
    sample_index: np.ndarray
    keys: SampleKeys
    sampler: SamplerConfig
    plan: Plan | None
    task: str = "rollout"
    traced: bool = False

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class Lesson:
    """What training is told of a step beside its rollouts: a row per sample.

    Attributes:
        conditioning, owner: as of a part, over all parts.
        advantages: [N].
        keep: bool [N], those worth training on.
        traced: whether to profile it.
    """

    step: int
    conditioning: Conditioning
    sample_index: np.ndarray
    keys: SampleKeys
    advantages: np.ndarray
    keep: np.ndarray
    traced: bool = False


@dataclass(frozen=True)
class Busy:
    """When a worker was busy, in seconds since 1970, and what with.

    Attributes:
        files: its profile, by the endings of files, where it was traced.
    """

    role: Role
    worker: int
    task: str
    step: int
    start: float
    end: float
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Watch:
    """Takes the time of a worker's tasks, and profiles those that it should: of a step, the first one."""

    role: Role
    worker: int
    busy: list[Busy] = field(default_factory=list)
    traced: set[int] = field(default_factory=set)

    @contextmanager
    def task(self, name: str, step: int, traced: bool = False) -> Iterator[None]:
        first = traced and step not in self.traced
        profile: AbstractContextManager[dict[str, bytes]] = profiled() if first else nullcontext({})
        with profile as files:
            start = time.time()
            yield
            end = time.time()
        self.busy.append(Busy(self.role, self.worker, name, step, start, end, files))
        if first:
            self.traced.add(step)
            self.busy.append(Busy(self.role, self.worker, "profile", step, end, time.time()))

    def told(self) -> list[Busy]:
        """What was measured since the last time."""
        told, self.busy = self.busy, []
        return told


@dataclass(frozen=True)
class Generated:
    """What a rollout worker says of a part; the rollouts and the images themselves go to those who need them.

    Attributes:
        version: of the weights that generated it: training steps of the stage that they had seen.
        received: seconds that it took to receive and check those weights, 0 where they were there.
        finite: bool [N], whether a sample is made of numbers; others cannot be scored.
    """

    version: int
    received: float
    finite: np.ndarray
    busy: list[Busy]


@dataclass(frozen=True)
class Scored:
    """The scores of a part."""

    table: ScoreTable
    busy: list[Busy]


@dataclass(frozen=True)
class Trained:
    """What the updates of a step did: metrics, averaged over them; optimiser steps of the stage so far; and all alarms."""

    metrics: dict[str, float]
    updates: int
    alarms: list[str]
    busy: list[Busy]
