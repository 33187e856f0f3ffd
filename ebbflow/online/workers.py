"""Workers of an online stage and how the stage calls them, wherever they run.

The stage's own process is one asyncio loop. It calls ``RolloutPool``, ``RewardPool`` and
``TrainingGroup``, one per role. They all reach their workers through ``Worker.call``, which names a
method by reference::

    await worker.call(RolloutWorker.generate, request, weights)

so mypy checks the arguments and the result across the process boundary. A worker is an object of
this process, a thread of it, or a Ray actor (``ray_workers``).

Large results stay where they are. A method listed in ``NUM_RETURNS`` gives several results: handles
of all but the last, which is the report for the stage's own process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from ebbflow.data.prompts import Prompt
from ebbflow.models.encoding import Embeddings
from ebbflow.online.messages import (
    Handle,
    RolloutRequest,
)
from ebbflow.online.sample_workers import RewardWorker, RolloutWorker
from ebbflow.online.training_worker import TrainingWorker
from ebbflow.recipe.online import Role, ScoringConfig
from ebbflow.rewards.base import RewardError
from ebbflow.rewards.combine import Scorer
from ebbflow.rollouts.generate import Diffusers
from ebbflow.rollouts.weights import WeightsVersion
from ebbflow.stage import StageContext
from ebbflow.training.update import PolicyUpdater
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
        answer: concurrent.futures.Future[tuple[Any, BaseException | None]]
        answer = concurrent.futures.Future()
        # Running from now on, so that nobody cancels it: the thread of a call that timed out may
        # still come back with an outcome, which is then ignored.
        answer.set_running_or_notify_cancel()

        def run_call() -> None:
            try:
                result = getattr(self.target, method.__name__)(*arguments, **keywords)
                answer.set_result((result, None))
            # Whatever is raised belongs to the coroutine that awaits the call, not to this thread.
            # As a result: a future of asyncio takes no StopIteration, and takes the CancelledError
            # of a reward's own threads for the end of the stage.
            except BaseException as error:
                answer.set_result((None, error))

        awaited = asyncio.wrap_future(answer)
        # A thread of its own rather than a pool's: a pool waits for hung threads at exit.
        threading.Thread(target=run_call, name=f"reward {self.index}", daemon=True).start()
        try:
            result, error = await awaited
        except asyncio.CancelledError:
            # Training and rollouts of this process keep the event loop from its turn for minutes.
            # It then sees the deadline of a call together with an answer that came in time.
            if awaited.cancelled() or not awaited.done():
                raise
            result, error = awaited.result()
        if error is not None:
            raise error
        return cast(Result, result)


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
            ended, running = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            # A StageError already says what happened and what to do, so the others are not waited
            # for.
            explained = any(
                isinstance(call.exception(), StageError) for call in ended if not call.cancelled()
            )
            if running and not explained:
                # A rank whose peer died fails with an error of the collective. The peer's own
                # error says more and may come a moment later.
                await asyncio.wait(running, timeout=self.grace)
        finally:
            # Those that are left wait in a collective for the rank that failed.
            for call in calls:
                call.cancel()
        outcomes = [call.exception() for call in calls if call.done() and not call.cancelled()]
        errors = [outcome for outcome in outcomes if outcome is not None]
        if errors:
            raise _explain_errors(errors)
        return [call.result() for call in calls]


def _explain_errors(errors: Sequence[BaseException]) -> BaseException:
    first = next((error for error in errors if isinstance(error, StageError)), errors[0])
    for other in errors:
        if other is not first and str(other) != str(first):
            first.add_note(f"another rank: {other}")
    return first


class StageWorkers(Protocol):
    """All workers of a stage, in one process (``LocalWorkers``) or on Ray (``ray_workers``).

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


class LocalWorkers:
    """``StageWorkers`` of this process; handles are the values themselves.

    Args:
        rollout_worker: left out, it generates with the trainer's own weights, so that none are
            sent.
        index: of this process among those of the stage, for the numbers of its workers.
    """

    def __init__(
        self,
        trainer: TrainingWorker,
        scorer: Scorer,
        rollout_worker: RolloutWorker | None = None,
        index: int = 0,
    ) -> None:
        ctx = trainer.ctx
        policy = trainer.updater.policy
        self.trainer = trainer
        self.shares_weights = rollout_worker is None
        engine = Diffusers(
            ctx,
            policy,
            trainer.updater.algorithm.generates,
            ctx.online_config.reuse_rollout_forward,
        )
        self.rollout_worker = rollout_worker or RolloutWorker(engine, index)
        self.reward_weights = scorer.reward_weights
        self.reads_rollouts = scorer.reads_latents or scorer.reads_sounds
        self.steps_before = trainer.updater.before.steps

        async def start_rollout_worker(index: int) -> Worker:
            return LocalWorker(self.rollout_worker, index)

        async def start_reward_worker(index: int) -> Worker:
            return ThreadWorker(RewardWorker(scorer, index), index)

        config = ctx.online_config
        num_rewards = config.resources.reward.count
        rewards = [
            ThreadWorker(RewardWorker(scorer, number), number)
            for number in range(index * num_rewards, (index + 1) * num_rewards)
        ]
        # One rank and one rollout worker, which take turns. Rewards run in threads, so that images
        # are scored while the next request generates and the policy trains.
        self.training = TrainingGroup([LocalWorker(trainer, index)])
        self.rollout = RolloutPool([LocalWorker(self.rollout_worker, index)], start_rollout_worker)
        self.reward = RewardPool(rewards, start_reward_worker, config.scoring)

    async def publish_weights(self, version: int, copy: str | None = None) -> WeightsVersion:
        # Even in one process another engine gets copies of the weights, with their digest.
        if not self.shares_weights:
            return self.trainer.publish(version, copy)
        engine = self.rollout_worker.engine
        assert isinstance(engine, Diffusers), (
            "only the engine of this process shares the trainer's weights"
        )
        # Nothing is sent. Choosing the copy is all there is to publish.
        engine.generates = copy or self.trainer.updater.algorithm.generates
        return WeightsVersion(version)

    async def fetch_value(self, handle: Handle) -> Any:
        return handle

    def put_value(self, value: Any) -> Handle:
        return value

    async def save_policy(self, folder: Path, *arguments: Any) -> None:
        self.trainer.save(folder, *arguments)

    async def save_checkpoint(self, folder: Path) -> None:
        self.trainer.save_checkpoint(folder)

    async def load_checkpoint(self, folder: Path) -> None:
        self.trainer.load_checkpoint(folder)

    def close(self) -> None:
        self.rollout_worker.close()


def open_local_workers(ctx: StageContext, updater: PolicyUpdater, scorer: Scorer) -> LocalWorkers:
    """Workers around a policy of this process, which generates and trains."""
    return LocalWorkers(TrainingWorker(ctx, updater, scorer=scorer), scorer)
