"""Workers of an online stage and how the stage calls them, wherever they run.

A worker is anything whose methods can be awaited: an object of this process, a thread of it, or a
Ray actor. The stage's own process is one asyncio loop: it awaits calls.

Large results stay where they are. A method listed in ``NUM_RETURNS`` gives several results: handles
of all but the last, which is the report for the stage's own process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ebbflow.online.messages import Handle
from ebbflow.recipe.online import Role, ScoringConfig
from ebbflow.rewards.base import RewardError
from ebbflow.rollouts.weights import WeightsVersion

logger = logging.getLogger(__name__)

NUM_RETURNS = {"generate": 3}
"""Results of the methods that give more than a report."""
MAX_DEATHS = 3
"""Rollout workers that may die or hang over the same request before the stage ends."""

StartWorker = Callable[[int], Awaitable["Worker"]]
"""Starts the worker with this number, once it can take calls."""


class StageError(RuntimeError):
    """An online stage cannot continue: names the role, what happened to its workers, and how to fix
    it.
    """


class WorkerDied(RuntimeError):
    """The process of a worker ended during a call."""


class ResultLost(StageError):
    """What a worker left for others is gone, with the machine on which it lay."""


class CallFailed(RuntimeError):
    """Every attempt at a call failed: holds the last attempt's error."""

    def __init__(self, error: BaseException, attempts: int) -> None:
        super().__init__(f"{type(error).__name__}: {error} (attempt {attempts} of {attempts})")
        self.error = error
        self.attempts = attempts


class Worker(Protocol):
    """One worker of a role; ``index`` is its number among them."""

    index: int

    async def call(self, method: str, *arguments: Any) -> Any:
        """The result of a method. Handles among the arguments arrive as their values.

        Raises:
            WorkerDied: the worker's process is gone; anything that the method raised.
        """

    def stop(self) -> None:
        """End the worker, whatever it is doing."""


class LocalWorker:
    """An object of this process. A call runs at once and to its end: nothing else happens
    meanwhile.
    """

    def __init__(self, target: Any, index: int = 0) -> None:
        self.target = target
        self.index = index

    async def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.target, method)(*arguments)

    def stop(self) -> None:
        """Nothing runs between calls."""


class ThreadWorker(LocalWorker):
    """An object of this process whose calls each run in a thread of their own. A thread that hangs
    cannot be ended: nobody waits for it, and it does not keep the process alive.
    """

    async def call(self, method: str, *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def deliver_outcome(resolve: Callable[[Any], None], outcome: Any) -> None:
            if not done.done():  # else the call was abandoned
                resolve(outcome)

        def run_call() -> None:
            try:
                resolve = done.set_result
                outcome = getattr(self.target, method)(*arguments)
            except (
                BaseException
            ) as error:  # whatever it is, it belongs to the one who awaits the call
                resolve = done.set_exception
                outcome = error
            with suppress(RuntimeError):  # the stage ended and closed its loop
                loop.call_soon_threadsafe(deliver_outcome, resolve, outcome)

        threading.Thread(target=run_call, name=f"reward {self.index}", daemon=True).start()
        return await done


class WorkerPool:
    """The workers of one role. Each has one call at a time; calls wait for an idle worker in their
    order.

    A worker that dies or hangs is replaced. The call that it had keeps the new worker and is
    repeated there at once, so that work which others wait for does not go to the end of the line.

    Args:
        start_worker: replaces the worker with a number; its time does not count as the call's.
        timeout: seconds for a call; without one, a call may take forever.
        max_attempts: attempts at a call, the first one included.
        retry_on: errors that another attempt may not meet. All others are raised at once.

    Attributes:
        num_replaced: workers that died or hung, and were replaced.
    """

    def __init__(
        self,
        role: Role,
        workers: Sequence[Worker],
        start_worker: StartWorker,
        timeout: float | None = None,
        max_attempts: int = 1,
        retry_on: Callable[[Exception], bool] = lambda error: isinstance(error, WorkerDied),
    ) -> None:
        self.role = role
        self.start_worker = start_worker
        self.timeout = timeout
        self.max_attempts = max_attempts
        self.retry_on = retry_on
        self.idle = deque(workers)
        self.turn = asyncio.Semaphore(
            len(workers)
        )  # strictly first come, first served, which asyncio.Queue is not
        self.num_replaced = 0

    async def call(self, method: str, arguments: Callable[[], tuple[Any, ...]]) -> Any:
        """The result of a method of the next idle worker.

        Args:
            arguments: evaluated when a worker takes the call, at every attempt.

        Raises:
            CallFailed: every attempt failed; errors that are not retried are raised as they are.
        """
        await self.turn.acquire()
        worker = self.idle.popleft()
        try:
            for _ in range(self.max_attempts):
                try:
                    async with asyncio.timeout(self.timeout) as deadline:
                        return await worker.call(method, *arguments())
                except Exception as error:
                    hung = isinstance(error, TimeoutError) and deadline.expired()
                    if not hung and not self.retry_on(error):
                        raise
                    last = TimeoutError(f"no answer after {self.timeout:g} s") if hung else error
                    if hung or isinstance(error, WorkerDied):
                        worker = await self._replace_worker(worker, last)
            raise CallFailed(last, self.max_attempts) from last
        finally:
            self.idle.append(worker)
            self.turn.release()

    async def _replace_worker(self, worker: Worker, error: Exception) -> Worker:
        what = "died" if isinstance(error, WorkerDied) else "hung"
        logger.warning(
            "%s worker %d %s; another is started (%s)", self.role, worker.index, what, error
        )
        worker.stop()
        replacement = await self.start_worker(worker.index)
        self.num_replaced += 1
        logger.info("%s worker %d is replaced; its work is repeated", self.role, worker.index)
        return replacement


def build_rollout_pool(
    workers: Sequence[Worker], start_worker: StartWorker, timeout: float | None = None
) -> WorkerPool:
    """Rollout workers: a request is repeated when its worker died or hung; errors of the engine end
    the stage.
    """
    return WorkerPool("rollout", workers, start_worker, timeout, max_attempts=MAX_DEATHS)


def build_reward_pool(
    workers: Sequence[Worker], start_worker: StartWorker, scoring: ScoringConfig
) -> WorkerPool:
    """Reward workers, retried as the recipe says: rewards are other people's code and servers. A
    broken contract is final, and so are images that are gone.
    """

    def is_retryable(error: Exception) -> bool:
        return not isinstance(error, (RewardError, ResultLost))

    return WorkerPool(
        "reward", workers, start_worker, scoring.timeout, scoring.retries + 1, is_retryable
    )


class TrainingGroup:
    """The ranks of the training group. Every method is called on all of them, with the same
    arguments.

    Args:
        grace: seconds that the other ranks have to say more, after one of them failed.
    """

    def __init__(self, ranks: Sequence[Worker], grace: float = 0) -> None:
        self.ranks = ranks
        self.grace = grace

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Every rank's result.

        Raises:
            the first error that explains the failure: that of a rank that died, or else of the
                first that failed. The errors of
            the other ranks are added as notes.
        """
        calls = [asyncio.ensure_future(rank.call(method, *arguments)) for rank in self.ranks]
        try:
            _, running = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if running and not any(
                isinstance(error, StageError) for error in _collect_errors(calls)
            ):
                await asyncio.wait(
                    running, timeout=self.grace
                )  # one rank failed: the others may know why
        finally:
            for call in calls:
                call.cancel()  # those that are left would wait for the rank that failed
        if errors := _collect_errors(calls):
            raise _explain_errors(errors)
        return [call.result() for call in calls]

    async def call_first(self, method: str, *arguments: Any) -> Any:
        """The result of rank 0, which alone is called."""
        return await self.ranks[0].call(method, *arguments)


def _collect_errors(calls: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
    return [
        error
        for call in calls
        if call.done() and not call.cancelled() and (error := call.exception())
    ]


def _explain_errors(errors: Sequence[BaseException]) -> BaseException:
    first = next((error for error in errors if isinstance(error, StageError)), errors[0])
    for other in errors:
        if other is not first and str(other) != str(first):
            first.add_note(f"another rank: {other}")
    return first


class StageWorkers(Protocol):
    """All workers of a stage, in one process (``local_workers``) or on Ray (``ray_workers``).

    Attributes:
        steps_before: rollout steps that the algorithm made with this policy in earlier stages.
        reward_weights: weight of each trained reward in the sum, by column.
        reads_latents: whether a reward or guardrail scores latents.
    """

    training: TrainingGroup
    rollout: WorkerPool
    reward: WorkerPool
    steps_before: int
    reward_weights: dict[str, float]
    reads_latents: bool

    async def publish_weights(self, version: int, copy: str | None = None) -> WeightsVersion:
        """The weights that generate from now on: of a copy of the policy; left out, of the one that
        the algorithm rolls out.
        """

    async def fetch_value(self, handle: Handle) -> Any:
        """The value of a handle, in this process.

        Raises:
            ResultLost: it is gone.
        """

    def put_value(self, value: Any) -> Handle:
        """A handle of a value, which is sent to several workers once."""

    async def save_policy(self, folder: Path, *arguments: Any) -> None:
        """Have the training group write a policy folder (``TrainingWorker.save``), here on this
        machine.
        """

    async def save_checkpoint(self, folder: Path) -> None:
        """Have every rank write its part of a checkpoint into a folder of this machine."""

    async def load_checkpoint(self, folder: Path) -> None:
        """Have every rank load a checkpoint that lies on this machine."""

    def close(self) -> None:
        """End all workers."""
