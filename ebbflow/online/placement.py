"""Where the roles of an online stage run: the protocol, and everything in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ebbflow.data.prompts import Prompt
from ebbflow.models.encoding import Embeddings
from ebbflow.online.roles import Generator, Judge, Trainer
from ebbflow.recipe.online import Role
from ebbflow.rewards.combine import Scorer
from ebbflow.rollouts.engine import Diffusers
from ebbflow.rollouts.weights import WeightsVersion

Handle = Any
"""Stands for a value that another worker may be given, wherever it lies."""


class WorkerDied(RuntimeError):
    """The process of a worker ended in the middle of its work."""


@dataclass(frozen=True, eq=False)
class Call:
    """A method of a worker at work: large results stay where they are, the last one is for the stage's own process."""

    values: tuple[Handle, ...]
    report: Handle


class Worker(Protocol):
    """One worker of a role."""

    def start(self, method: str, *arguments: Any) -> Call:
        """Begin; handles among the arguments arrive as their values."""

    def stop(self) -> None:
        """Give it up, whatever it is doing."""


class Placement(Protocol):
    """The workers of a stage.

    Attributes:
        training: all ranks of the training group.
        steps_before: rollout steps that the algorithm made with this policy in earlier stages.
        weights: of the trained rewards, by their columns.
    """

    training: Sequence[Worker]
    steps_before: int
    reward_weights: dict[str, float]

    def hire(self, role: Role, index: int) -> Worker:
        """A new worker of a role, the first or one that replaces another."""

    def encode(self, prompts: Iterable[Prompt]) -> Embeddings:
        """Every different prompt, once."""

    def publish(self, version: int, copy: str | None = None) -> WeightsVersion:
        """The weights that generate from now on: those of a copy of the policy, or of the one that the rollouts are of."""

    def wait(self, calls: Sequence[Call], timeout: float | None) -> list[Call]:
        """Those that ended, after the first did or ``timeout`` seconds; at once where there are none."""

    def report(self, call: Call) -> Any:
        """What an ended call has to say.

        Raises:
            WorkerDied: its process is gone; anything that the method raised.
        """

    def fetch(self, handle: Handle) -> Any:
        """The value of a handle, in this process."""

    def put(self, value: Any) -> Handle:
        """The handle of a value."""

    def write(self, folder: Path, method: str, *arguments: Any) -> None:
        """Have the training group write a folder (a method of ``Trainer``), here on the machine of this process."""

    def checkpoint(self, folder: Path) -> None:
        """Have every rank write its part of where training stands into a folder on the machine of this process."""

    def restore(self, checkpoint: Path) -> None:
        """Put the training group where it stood at a checkpoint, which lies on the machine of this process."""

    def close(self) -> None:
        """End all workers."""


@dataclass(frozen=True)
class _Value:
    """One result of a future."""

    future: Future[tuple[Any, ...]]
    index: int


class _Here:
    """A worker in this process: at once, or in a thread of its own for each call, which nothing can stop but nobody waits for."""

    def __init__(self, role: Any, results: dict[str, int], threaded: bool = False) -> None:
        self.role, self.results, self.threaded = role, results, threaded

    def start(self, method: str, *arguments: Any) -> Call:
        future: Future[tuple[Any, ...]] = Future()
        given = [argument.future.result()[argument.index] if isinstance(argument, _Value) else argument for argument in arguments]
        if self.threaded:
            threading.Thread(target=_run, args=(future, getattr(self.role, method), given), daemon=True).start()
        else:
            _run(future, getattr(self.role, method), given)
        count = self.results.get(method, 1)
        return Call(tuple(_Value(future, index) for index in range(count - 1)), _Value(future, count - 1))

    def stop(self) -> None:
        """A thread cannot be stopped; its result is not looked at."""


def _run(future: Future[tuple[Any, ...]], method: Any, arguments: list[Any]) -> None:
    try:
        result = method(*arguments)
        future.set_result(result if isinstance(result, tuple) else (result,))
    except BaseException as error:  # whatever it is, it belongs to the one who asks for the result
        future.set_exception(error)


RESULTS = {"generate": 3}
"""Results of the roles' methods that give more than a report."""


class InProcess:
    """All roles in this process: training and rollouts by turns, rewards in threads beside them.

    Args:
        shares: whether the generator's weights are the trainer's, so that none need to be sent.
    """

    def __init__(self, trainer: Trainer, generator: Generator, scorer: Scorer, shares: bool = True) -> None:
        self.trainer, self.generator, self.scorer, self.shares = trainer, generator, scorer, shares
        self.reward_weights = scorer.reward_weights
        self.training: Sequence[Worker] = [_Here(trainer, RESULTS)]
        self.steps_before = trainer.updater.before.steps

    def hire(self, role: Role, index: int) -> Worker:
        if role == "rollout":
            return _Here(self.generator, RESULTS)
        return _Here(Judge(self.scorer, index), RESULTS, threaded=True)

    def encode(self, prompts: Iterable[Prompt]) -> Embeddings:
        return self.trainer.encode(prompts)

    def publish(self, version: int, copy: str | None = None) -> WeightsVersion:
        if not self.shares:
            return self.trainer.publish(version, copy)
        engine = self.generator.engine
        assert isinstance(engine, Diffusers), "only the engine of this process shares the trainer's weights"
        engine.generates = copy or self.trainer.updater.algorithm.generates
        return WeightsVersion(version)

    def wait(self, calls: Sequence[Call], timeout: float | None) -> list[Call]:
        futures = {call: call.report.future for call in calls}
        done = wait(futures.values(), timeout, FIRST_COMPLETED).done
        return [call for call, future in futures.items() if future in done]

    def report(self, call: Call) -> Any:
        return self.fetch(call.report)

    def fetch(self, handle: Handle) -> Any:
        return handle.future.result()[handle.index]

    def put(self, value: Any) -> Handle:
        future: Future[tuple[Any, ...]] = Future()
        future.set_result((value,))
        return _Value(future, 0)

    def write(self, folder: Path, method: str, *arguments: Any) -> None:
        getattr(self.trainer, method)(folder, *arguments)

    def checkpoint(self, folder: Path) -> None:
        self.trainer.checkpoint(folder)

    def restore(self, checkpoint: Path) -> None:
        self.trainer.restore(checkpoint)

    def close(self) -> None:
        self.generator.close()
