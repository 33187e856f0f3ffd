"""Jobs for the workers of a role: taken in order, one a worker at a time, and done again when a worker dies or hangs."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ebbflow.online.placement import Call, Placement, Worker, WorkerDied
from ebbflow.recipe.online import Role

MAX_DEATHS = 3
"""Deaths of workers over the same job after which the stage ends; of a job that may fail, ``retries`` says how many."""


class StageError(RuntimeError):
    """An online stage cannot go on: names the role, what happened to its workers, and the way out."""


@dataclass(eq=False)
class Job:
    """A method of a worker to be called.

    Attributes:
        arguments: asked for when a worker takes the job.
        done: gets the call once it has ended, and its report.
        failed: gets the reason when every attempt failed; without it the stage ends with the last attempt's error.
        fatal: errors of the method that no further attempt would mend.
    """

    method: str
    arguments: Callable[[], tuple[Any, ...]]
    done: Callable[[Call, Any], None]
    failed: Callable[[str], None] | None = None
    fatal: tuple[type[BaseException], ...] = (BaseException,)
    attempts: int = 0


@dataclass(frozen=True)
class _Running:
    job: Job
    worker: Worker
    index: int
    deadline: float


class Pool:
    """The workers of one role.

    Attributes:
        replaced: workers that died or hung, and were replaced.
    """

    def __init__(self, placement: Placement, role: Role, count: int, timeout: float | None = None, retries: int = 0) -> None:
        self.placement, self.role, self.timeout, self.retries = placement, role, timeout, retries
        self.idle = deque((placement.hire(role, index), index) for index in range(count))
        self.queue: deque[Job] = deque()
        self.running: dict[Call, _Running] = {}
        self.replaced = 0

    def submit(self, job: Job) -> None:
        self.queue.append(job)

    def start_waiting(self) -> bool:
        """Give the next jobs to idle workers, the oldest first; whether there were any."""
        started = False
        while self.queue and self.idle:
            job, (worker, index) = self.queue.popleft(), self.idle.popleft()
            job.attempts += 1
            call = worker.start(job.method, *job.arguments())
            self.running[call] = _Running(job, worker, index, time.monotonic() + (self.timeout or float("inf")))
            started = True
        return started

    def settle(self, ended: Sequence[Call]) -> None:
        """Take the results of calls that ended, and give up those that take too long."""
        # Found before anything is settled: replacing a worker takes time, in which others may end that nobody looks at.
        now = time.monotonic()
        late = [call for call, running in self.running.items() if now > running.deadline and call not in ended]
        for call in [call for call in ended if call in self.running]:
            self._settle(call, self.running.pop(call))
        for running in [self.running.pop(call) for call in late]:
            self._replace(running)
            self._again(running.job, TimeoutError(f"no answer after {self.timeout:g} s"))

    @property
    def next_deadline(self) -> float:
        return min((running.deadline for running in self.running.values()), default=float("inf"))

    def _settle(self, call: Call, running: _Running) -> None:
        try:
            report = self.placement.report(call)
        except WorkerDied as error:
            self._replace(running)
            self._mourn(running.job, error)
            return
        except running.job.fatal:
            raise
        except Exception as error:  # a reward raises anything, and the recipe says how often it may
            self.idle.append((running.worker, running.index))
            self._again(running.job, error)
            return
        self.idle.append((running.worker, running.index))
        running.job.done(call, report)

    def _replace(self, running: _Running) -> None:
        running.worker.stop()
        self.replaced += 1
        self.idle.append((self.placement.hire(self.role, running.index), running.index))

    def _mourn(self, job: Job, error: WorkerDied) -> None:
        warnings.warn(f"{self.role} worker died and was replaced; its work is done again ({error})", stacklevel=2)
        if job.failed is not None:
            self._again(job, error)
            return
        if job.attempts >= MAX_DEATHS:
            raise StageError(
                f"{job.attempts} {self.role} workers died over the same work; the last one: {error}. "
                f"Look at the memory of their machine, or lower the stage's micro_batch"
            ) from error
        self.queue.appendleft(job)

    def _again(self, job: Job, error: Exception) -> None:
        if job.attempts <= self.retries:
            self.queue.appendleft(job)
            return
        if job.failed is None:
            raise error
        job.failed(f"{type(error).__name__}: {error} (attempt {job.attempts} of {self.retries + 1})")


class Desk:
    """Keeps all pools at work while something is waited for."""

    def __init__(self, placement: Placement, pools: Sequence[Pool]) -> None:
        """``pools``: those that should get their workers first come first."""
        self.placement, self.pools = placement, pools

    def dispatch(self) -> None:
        """Start everything that can start now; work that is done at once makes room for more."""
        while sum(pool.start_waiting() for pool in self.pools):  # not any(): every pool has to have its turn
            self._settle(timeout=0)

    def until(self, finished: Callable[[], bool]) -> None:
        """Work until ``finished()``."""
        self.dispatch()
        while not finished():
            self._settle(self._patience())
            self.dispatch()

    def until_ended(self, calls: Sequence[Call]) -> None:
        """Work until the calls of others have ended."""
        self.dispatch()
        waiting = list(calls)
        while waiting:
            ended = self._settle(self._patience(), waiting)
            waiting = [call for call in waiting if call not in ended]
            self.dispatch()

    def _settle(self, timeout: float | None, also: Sequence[Call] = ()) -> list[Call]:
        running = [call for pool in self.pools for call in pool.running]
        assert running or also, "nothing is under way that could ever end"
        ended = self.placement.wait([*running, *also], timeout)
        for pool in self.pools:
            pool.settle(ended)
        return ended

    def _patience(self) -> float | None:
        """Seconds until the first worker takes too long."""
        deadline = min(pool.next_deadline for pool in self.pools)
        return None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
