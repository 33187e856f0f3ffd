"""Workers of an online stage and how the stage calls them, wherever they run.

The stage's own process is one asyncio loop. It calls ``RolloutPool``, ``RewardPool`` and
``TrainingGroup``: one typed stub per role. They all reach their workers through ``Worker.call``,
which names a method by reference::

    await worker.call(RolloutWorker.generate, request, weights)

so mypy checks the arguments and the result across the process boundary. A worker is an object of
this process, a thread of it, or a Ray actor.

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
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

from ebbflow.data.prompts import Prompt
from ebbflow.models.encoding import Embeddings
from ebbflow.online.messages import (
    Handle,
    RolloutReport,
    RolloutRequest,
    TrainingReport,
)
from ebbflow.online.reward_worker import RewardWorker
from ebbflow.online.rollout_worker import RolloutWorker
from ebbflow.online.tracing import TraceSpan
from ebbflow.online.training_worker import TrainingWorker
from ebbflow.recipe.online import Role, ScoringConfig
from ebbflow.rewards.base import RewardError
from ebbflow.rewards.combine import ScoreTable
from ebbflow.rollouts.weights import WeightsVersion
from ebbflow.watchdog import watch

logger = logging.getLogger(__name__)

NUM_RETURNS = {"generate": 3}
"""Results of the methods that give more than a report."""
MAX_DEATHS = 3
"""Rollout workers that may die or hang over the same request before the stage ends."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

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

    async def call(
        self,
        method: Callable[Concatenate[Any, Arguments], Result],
        *arguments: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        """Call a method of the worker, named by reference as in ``TrainingWorker.train``.

        The method runs by its name, so a subclass may override it. Handles among the arguments
        arrive as their values.

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

    async def call(
        self,
        method: Callable[Concatenate[Any, Arguments], Result],
        *arguments: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        # By name, not ``method(self.target)``: it must run what a subclass overrides, as on Ray.
        result: Result = getattr(self.target, method.__name__)(*arguments, **keywords)
        return result

    def stop(self) -> None:
        """Nothing runs between calls."""


class ThreadWorker(LocalWorker):
    """An object of this process whose calls each run in a thread of their own. A thread that hangs
    cannot be ended: nobody waits for it, and it does not keep the process alive.
    """

    async def call(
        self,
        method: Callable[Concatenate[Any, Arguments], Result],
        *arguments: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Result] = loop.create_future()

        def deliver_outcome(resolve: Callable[[Any], None], outcome: Any) -> None:
            # A call that timed out has a cancelled future; its thread may still come back.
            if not answer.done():
                resolve(outcome)

        def run_call() -> None:
            resolve: Callable[[Any], None] = answer.set_result
            try:
                outcome = getattr(self.target, method.__name__)(*arguments, **keywords)
            # Whatever is raised belongs to the coroutine that awaits the call, not to this thread.
            except BaseException as error:
                resolve = answer.set_exception
                outcome = error
            # A closed loop raises a RuntimeError: the stage has ended, and nobody waits.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(deliver_outcome, resolve, outcome)

        # A thread of its own rather than a pool's: a pool waits for hung threads at exit.
        threading.Thread(target=run_call, name=f"reward {self.index}", daemon=True).start()
        try:
            return await answer
        except asyncio.CancelledError:
            # Training and rollouts of this process keep the event loop from its turn for minutes.
            # It then sees the deadline of a call together with an answer that came in time.
            if answer.cancelled() or not answer.done():
                raise
            return answer.result()


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
        # A semaphore is strictly first come, first served, which asyncio.Queue is not.
        self.turn = asyncio.Semaphore(len(workers))
        self.num_replaced = 0

    async def run(
        self, call: Callable[[Worker], Awaitable[Result]], what: str = "a call"
    ) -> Result:
        """Run a call on the next idle worker.

        Args:
            call: makes the call on a worker; evaluated when a worker takes it, at every attempt.
            what: names it where it takes long.

        Raises:
            CallFailed: every attempt failed; errors that are not retried are raised as they are.
        """
        await self.turn.acquire()
        worker = self.idle.popleft()
        try:
            # Attempts keep the worker, or its replacement: the call does not go back to the end of
            # the line.
            for _ in range(self.max_attempts):
                try:
                    async with asyncio.timeout(self.timeout) as deadline:
                        with watch(f"{self.role} worker {worker.index}: {what}"):
                            return await call(worker)
                except Exception as error:
                    # The call may raise a TimeoutError of its own, such as a reward whose server
                    # did not answer. Only the pool's own deadline means that the worker hangs.
                    hung = isinstance(error, TimeoutError) and deadline.expired()
                    if not hung and not self.retry_on(error):
                        raise
                    last = TimeoutError(f"no answer after {self.timeout:g} s") if hung else error
                    # Replaced after the last attempt, too: other calls need the worker.
                    if hung or isinstance(error, WorkerDied):
                        worker = await self._replace_worker(worker, last)
            raise CallFailed(last, self.max_attempts) from last
        finally:
            # Idle again before the turn is released: who gets the turn takes a worker at once.
            self.idle.append(worker)
            self.turn.release()

    async def _replace_worker(self, worker: Worker, error: Exception) -> Worker:
        what = "died" if isinstance(error, WorkerDied) else "hung"
        logger.warning(
            "%s worker %d %s; another is started (%s)", self.role, worker.index, what, error
        )
        worker.stop()
        # The replacement has the same number, so the timeline shows one row for both.
        replacement = await self.start_worker(worker.index)
        self.num_replaced += 1
        logger.info("%s worker %d is replaced; its work is repeated", self.role, worker.index)
        return replacement


class RolloutPool(WorkerPool):
    """Rollout workers (``RolloutWorker``). A request is repeated when its worker died or hung;
    errors of the engine end the stage.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        start_worker: StartWorker,
        timeout: float | None = None,
    ) -> None:
        super().__init__("rollout", workers, start_worker, timeout, max_attempts=MAX_DEATHS)

    async def generate(
        self, request: RolloutRequest, weights: Callable[[], WeightsVersion]
    ) -> tuple[Handle, Handle, RolloutReport]:
        """Generate the samples of a request: (handle of the rollouts, handle of the images,
        report).

        Args:
            weights: evaluated when a worker takes the request.
        """
        # In mode ``async`` the request waits for a worker and then takes the newest weights, not
        # those of the time at which it was queued.
        return await self.run(
            lambda worker: worker.call(RolloutWorker.generate, request, weights()),
            f"generating samples of step {request.step}",
        )


class RewardPool(WorkerPool):
    """Reward workers (``RewardWorker``), retried as the recipe says: rewards are other people's
    code and servers.
    """

    def __init__(
        self, workers: Sequence[Worker], start_worker: StartWorker, scoring: ScoringConfig
    ) -> None:
        # A reward that breaks its contract breaks it again, and lost images do not come back.
        def is_retryable(error: Exception) -> bool:
            return not isinstance(error, (RewardError, ResultLost))

        max_attempts = scoring.retries + 1
        super().__init__(
            "reward", workers, start_worker, scoring.timeout, max_attempts, is_retryable
        )

    async def score(
        self,
        request: RolloutRequest,
        images: Handle,
        rollouts: Handle | None = None,
        with_guards: bool = False,
        profiled: bool = False,
    ) -> tuple[ScoreTable, dict[str, np.ndarray], list[TraceSpan]]:
        """Score the images of a request; arguments and result are those of
        ``RewardWorker.score``.
        """
        return await self.run(
            lambda worker: worker.call(
                RewardWorker.score,
                images,
                request.prompts,
                request.step,
                with_guards,
                profiled,
                rollouts,
            ),
            f"scoring samples of step {request.step}",
        )


class TrainingGroup:
    """The ranks of the training group (``TrainingWorker``). Every method but ``encode`` runs on all
    of them, with the same arguments, because the ranks wait for each other in collectives.

    Args:
        grace: seconds that the other ranks have to say more, after one of them failed.
    """

    def __init__(self, ranks: Sequence[Worker], grace: float = 0) -> None:
        self.ranks = ranks
        self.grace = grace

    async def encode(self, prompts: Sequence[Prompt]) -> Embeddings:
        """Encode every different prompt once, on rank 0 alone: the others need no embeddings."""
        return await self.ranks[0].call(TrainingWorker.encode, prompts)

    async def receive(self, *rollouts: Handle) -> None:
        """Bring rollouts to the machines of all ranks, before a step that none may leave half-way.

        Raises:
            ResultLost: some of them are gone.
        """
        await self.call(TrainingWorker.receive, *rollouts)

    async def train(
        self, requests: Handle, advantages: Handle, *rollouts: Handle
    ) -> list[TrainingReport]:
        """Take the updates of a step; every rank's report. Arguments are handles of those of
        ``TrainingWorker.train``.
        """
        return await self.call(TrainingWorker.train, requests, advantages, *rollouts)

    async def publish(self, version: int, copy: str | None = None) -> WeightsVersion:
        """Gather the weights that generate from now on (``TrainingWorker.publish``)."""
        versions = await self.call(TrainingWorker.publish, version, copy)
        return versions[0]

    async def measure_parity(self, request: RolloutRequest, rollouts: Handle) -> dict[str, float]:
        """Compare another engine's samples with the policy (``TrainingWorker.measure_parity``)."""
        metrics = await self.call(TrainingWorker.measure_parity, request, rollouts)
        return metrics[0]

    async def call(
        self,
        method: Callable[Concatenate[Any, Arguments], Result],
        *arguments: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> list[Result]:
        """Call a method on every rank; every rank's result.

        Raises:
            the first error that explains the failure: that of a rank that died, or else of the
                first that failed. The errors of the other ranks are added as notes.
        """
        calls = [
            asyncio.ensure_future(rank.call(method, *arguments, **keywords)) for rank in self.ranks
        ]
        try:
            _, running = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            # A StageError already says what happened and what to do, so the others are not waited
            # for.
            explained = any(isinstance(error, StageError) for error in _collect_errors(calls))
            if running and not explained:
                # A rank whose peer died fails with an error of the collective. The peer's own
                # error says more and may come a moment later.
                await asyncio.wait(running, timeout=self.grace)
        finally:
            # Those that are left wait in a collective for the rank that failed.
            for call in calls:
                call.cancel()
        errors = _collect_errors(calls)
        if errors:
            raise _explain_errors(errors)
        return [call.result() for call in calls]


def _collect_errors(calls: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
    ended = [call for call in calls if call.done() and not call.cancelled()]
    errors = [call.exception() for call in ended]
    return [error for error in errors if error is not None]


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
        reads_rollouts: whether a reward or guardrail scores latents or sound.
    """

    training: TrainingGroup
    rollout: RolloutPool
    reward: RewardPool
    steps_before: int
    reward_weights: dict[str, float]
    reads_rollouts: bool

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
