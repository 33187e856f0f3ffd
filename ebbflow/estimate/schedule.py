"""When the workers of an online stage are busy: a simulation of its loop, event by event, with
given seconds for each task.

It follows ``ebbflow.online.loop`` and ``ebbflow.online.rollout_queue`` under ``placement: ray``: a
step is cut into requests, a rollout worker takes the oldest, a reward worker scores it, and the
step trains once all of its requests are there. Workers of a role are alike, and nothing fails.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean
from typing import NamedTuple

WARM_UP = 3
"""Steps at the beginning that are not measured, besides those that are generated ahead of the
first.
"""
MEASURED = 6
"""Steps that are measured."""


@dataclass(frozen=True)
class TaskSeconds:
    """Seconds of each task, on one worker of its role.

    Attributes:
        rollout: seconds of a request.
        scoring: seconds to score the images of a request.
        training: seconds of a step's training, on all ranks.
        receive: seconds to receive new weights, before the first request with them.
        between: seconds between training and the rollouts of the next step: publishing weights,
            advantages, records.
    """

    rollout: float
    scoring: float
    training: float
    receive: float = 0.0
    between: float = 0.0


@dataclass(frozen=True)
class Stage:
    """What the loop does in a step.

    Attributes:
        requests: number of requests of a step.
        steps_ahead: steps whose rollouts are in flight while another one trains.
        newest: whether a request takes the weights that are newest when it begins (mode ``async``).
    """

    requests: int
    steps_ahead: int
    newest: bool = False


class Schedule(NamedTuple):
    """What a stage does once it runs steadily.

    Attributes:
        step: seconds.
        training, rollout, reward: the share of the time in which the workers of the role are busy.
        staleness: mean age of the samples, in steps.
    """

    step: float
    training: float
    rollout: float
    reward: float
    staleness: float


def simulate_stage(
    stage: Stage, seconds: TaskSeconds, rollout_workers: int, reward_workers: int
) -> Schedule:
    """Run some steps of a stage.

    Raises:
        ValueError: there are no requests or no workers, or no task takes any time.
    """
    if (
        min(stage.requests, rollout_workers, reward_workers) < 1
        or seconds.rollout + seconds.training <= 0
    ):
        raise ValueError(
            f"{stage} with {rollout_workers} rollout and {reward_workers} reward workers takes no"
            f" time: {seconds}"
        )
    return _Simulation(stage, seconds, rollout_workers, reward_workers).run_steps()


@dataclass
class _Pool:
    """Workers of a role; ``busy`` are the seconds that they worked."""

    idle: list[int]
    queue: deque[tuple[int, int]] = field(default_factory=deque)
    busy: float = 0.0


class _Simulation:
    """The state of the loop. A request is (its step, the version that the step was started
    with)."""

    def __init__(
        self, stage: Stage, seconds: TaskSeconds, rollout_workers: int, reward_workers: int
    ) -> None:
        self.stage = stage
        self.seconds = seconds
        self.rollout = _Pool(list(range(rollout_workers)))
        self.reward = _Pool(list(range(reward_workers)))
        # The version of the weights that each rollout worker has; -1 is none.
        self.versions = [-1] * rollout_workers
        self.num_steps = stage.steps_ahead + WARM_UP + MEASURED
        self.now = 0.0
        self.version = 0
        self.next_step = 0
        # Step to the number of its requests that are not scored yet.
        self.left: dict[int, int] = {}
        # Step to the version of the weights of each of its requests.
        self.made_with: dict[int, list[int]] = {}
        self.trains = False
        # At the end of each step: the time, and the busy seconds of rollout and reward workers.
        self.ends: list[tuple[float, float, float]] = []
        self.ages: list[float] = []
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        # Events at the same time happen in the order in which they were scheduled; the number also
        # keeps the heap from comparing functions.
        self.number = count()

    def run_steps(self) -> Schedule:
        self._start_rollouts()
        while self.version < self.num_steps:
            self._dispatch_requests()
            self._start_training()
            self.now, _, happens = heapq.heappop(self.events)
            happens()
        # The end of the step before the first that is measured.
        first = self.ends[-MEASURED - 1]
        last = self.ends[-1]
        time, rollouts, scoring = (end - start for start, end in zip(first, last, strict=True))
        return Schedule(
            step=time / MEASURED,
            training=self.seconds.training * MEASURED / time,
            rollout=rollouts / time / len(self.versions),
            reward=scoring / time / (len(self.reward.idle) + self._scoring),
            staleness=fmean(self.ages[-MEASURED:]),
        )

    _scoring = 0
    """Reward workers that are busy."""

    def _start_rollouts(self) -> None:
        while len(self.left) <= self.stage.steps_ahead:
            self.left[self.next_step] = self.stage.requests
            self.made_with[self.next_step] = []
            self.rollout.queue.extend([(self.next_step, self.version)] * self.stage.requests)
            self.next_step += 1

    def _dispatch_requests(self) -> None:
        """Give waiting requests to idle workers."""
        while self.rollout.queue and self.rollout.idle:
            step, version = self.rollout.queue.popleft()
            self._start_generation(
                self.rollout.idle.pop(), step, self.version if self.stage.newest else version
            )
        while self.reward.queue and self.reward.idle:
            step, _ = self.reward.queue.popleft()
            self.reward.idle.pop()
            self._scoring += 1
            self.reward.busy += self.seconds.scoring
            self._schedule_event(self.seconds.scoring, lambda step=step: self._finish_scoring(step))  # type: ignore[misc]

    def _start_generation(self, worker: int, step: int, version: int) -> None:
        taken = self.seconds.rollout + (
            self.seconds.receive if self.versions[worker] != version else 0.0
        )
        self.versions[worker] = version
        self.rollout.busy += taken
        self.made_with[step].append(version)

        def finish_generation() -> None:
            self.rollout.idle.append(worker)
            self.reward.queue.append((step, version))

        self._schedule_event(taken, finish_generation)

    def _finish_scoring(self, step: int) -> None:
        self.reward.idle.append(0)
        self._scoring -= 1
        self.left[step] -= 1

    def _start_training(self) -> None:
        """Train on the first step whose requests are all there."""
        # The oldest: ``left`` has steps in the order in which they were started.
        complete = next((step for step, left in self.left.items() if not left), None)
        if self.trains or complete is None:
            return
        self.trains = True
        del self.left[complete]
        self.ages.append(self.version - fmean(self.made_with.pop(complete)))
        self._schedule_event(self.seconds.training + self.seconds.between, self._finish_training)

    def _finish_training(self) -> None:
        self.trains = False
        self.version += 1
        self.ends.append((self.now, self.rollout.busy, self.reward.busy))
        self._start_rollouts()

    def _schedule_event(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.number), happens))
