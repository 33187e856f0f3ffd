"""The roles of an online stage as Ray actors: a training group, rollout workers and reward workers, each a process of its own.

Rollouts, images and weights go from actor to actor through Ray's object store; the stage's own process holds references to them
and reads reports. Ray restarts nothing: the pools replace rollout and reward workers and have their work done again, and a
training rank that dies ends the stage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import ray
from ray.exceptions import ObjectLostError, OutOfMemoryError, OwnerDiedError, RayActorError, RayError, RayTaskError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ebbflow.data.prompts import Prompt
from ebbflow.models.encoding import Embeddings
from ebbflow.online.placement import RESULTS, Call, Handle, Worker, WorkerDied
from ebbflow.online.pool import StageError
from ebbflow.online.ray_actor import (
    BESIDE,
    CHUNK,
    Actor,
    ActorBeside,
    Folders,
    open_generator,
    open_judge,
    open_rank,
    ship_tensors,
)
from ebbflow.online.ray_broadcast import Broadcast
from ebbflow.online.work import Lesson
from ebbflow.recipe.online import Role, WorkersConfig
from ebbflow.rollouts.weights import WeightsVersion
from ebbflow.stage import StageContext
from ebbflow.storage.artifacts import new_folder, verify
from ebbflow.storage.disk import safe_join
from ebbflow.training.checkpoint import part_files

ROLES: tuple[Role, ...] = get_args(Role)
PLACED, GRACE = 300, 10
"""Seconds until every worker must have its place; and for the other ranks to say what went wrong, after one failed."""
LOST = (RayActorError, ObjectLostError, OutOfMemoryError)
"""What Ray says when a process, or the machine with what it left behind, is gone."""


class TrainingDied(StageError):
    """A rank of the training group is gone, and with it what the stage has learnt: names the rank and the step."""


@dataclass(frozen=True, eq=False)
class _Call(Call):
    worker: _Worker


class _Worker:
    """One worker, as the stage's own process sees it."""

    def __init__(self, placement: RayPlacement, role: Role, index: int) -> None:
        self.placement, self.role, self.index = placement, role, index
        workers = placement.workers(role)
        options = {
            "num_cpus": workers.cpus,
            "num_gpus": workers.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(placement.group, placement.bundle(role, index)),
        }
        actor = Actor if placement.ctx.online.transfer == "store" else ActorBeside
        self.actor = actor.options(**options).remote(role, workers, sys.path)
        self.opened: ray.ObjectRef | None = None

    def open(self, make: Callable[..., Any], *arguments: Any) -> None:
        """Begin to make what works there."""
        self.opened = self.actor.open.remote(make, *arguments)

    def start(self, method: str, *arguments: Any) -> Call:
        count = RESULTS.get(method, 1)
        given = [self.placement.for_worker(argument, self) for argument in arguments]
        results = self.actor.call.options(num_returns=count).remote(method, *given)
        *values, report = results if count > 1 else [results]
        return _Call(tuple(values), report, self)

    def beside(self, method: str, *arguments: Any) -> Call:
        """Begin while another method may be at work; under ``transfer: broadcast``."""
        return _Call((), self.actor.call.options(concurrency_group=BESIDE).remote(method, *arguments), self)

    @property
    def ready(self) -> bool:
        """Whether it has loaded."""
        opened = _Call((), self.opened, self)
        return bool(_ended([self.opened])) and self.placement.failure(opened) is None

    def stop(self) -> None:
        ray.kill(self.actor)


class RayPlacement:
    """Every worker an actor, with the cores and GPUs that the recipe gives its role.

    Args:
        folders: where actors find what they load.

    Raises:
        StageError: the cluster has no room for the workers, or one of them died while it loaded.
    """

    def __init__(self, ctx: StageContext, folders: Folders) -> None:
        self.ctx, self.folders = ctx, folders
        self.reward_weights = {reward.column: reward.weight for reward in ctx.recipe.rewards}
        self.hired: list[_Worker] = []
        self.first: dict[tuple[Role, int], _Worker] = {}
        self.lesson: tuple[Lesson | None, Any] = (None, None)
        self.broadcast: Broadcast | None = None
        self.step = 0
        ship_tensors()
        if not ray.is_initialized():
            ray.init(include_dashboard=False)
        self.group = self._reserve()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def workers(self, role: Role) -> WorkersConfig:
        """What the recipe gives a role."""
        return getattr(self.ctx.online.resources, role)

    def bundle(self, role: Role, index: int) -> int:
        """The place of a worker among all."""
        return sum(self.workers(before).count for before in ROLES[: ROLES.index(role)]) + index

    def for_worker(self, argument: Any, worker: _Worker) -> Any:
        """An argument as it is given to a worker: the same lesson for all ranks is sent once, weights are where it finds them."""
        if isinstance(argument, Lesson):
            if self.lesson[0] is not argument:
                self.lesson = (argument, ray.put(argument))
            return self.lesson[1]
        if isinstance(argument, WeightsVersion) and self.broadcast:
            return self.broadcast.within_reach(argument, worker)
        return argument

    def hire(self, role: Role, index: int) -> _Worker:
        worker = self.first.pop((role, index), None) or self._hire(role, index)
        if role == "reward":  # whose time for an answer must not pass while it loads; what went wrong, its answer says
            ray.wait([worker.opened], timeout=PLACED, fetch_local=False)
        return worker

    def encode(self, prompts: Iterable[Prompt]) -> Embeddings:
        call = self.training[0].start("encode", list(prompts))
        self._wait_for([call])
        return self.report(call)

    def publish(self, version: int, copy: str | None = None) -> WeightsVersion:
        self.step = version
        return self.broadcast.publish(version, copy) if self.broadcast else self._all("publish", version, copy)[0]

    def wait(self, calls: Sequence[Call], timeout: float | None) -> list[Call]:
        """As the protocol.

        Raises:
            TrainingDied: a training rank is gone; whatever else one of them raised: the others would wait for it in vain.
        """
        by_report = {call.report: call for call in calls}
        if not by_report:
            return []
        ray.wait(list(by_report), timeout=timeout, fetch_local=False)
        ended = [by_report[report] for report in _ended(list(by_report))]
        self._look_after_training(ended, calls)
        return ended

    def report(self, call: Call) -> Any:
        assert isinstance(call, _Call)
        try:
            return self.fetch(call.report)
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(cause, OwnerDiedError):  # only weights belong to an actor, the first rank
                raise self._death(self.hired[0], cause) from error
            if isinstance(cause, LOST):
                raise self._death(call.worker, cause) from error
            raise cause from error

    def fetch(self, handle: Handle) -> Any:
        return ray.get(handle)

    def put(self, value: Any) -> Handle:
        return ray.put(value)

    def write(self, folder: Path, method: str, *arguments: Any) -> None:
        """As the protocol: file by file from the machine of rank 0.

        Raises:
            ArtifactError: what arrived is not what rank 0 committed.
        """
        with new_folder(folder) as unfinished:
            self._collect(unfinished, method, *arguments)
            verify(unfinished)

    def checkpoint(self, folder: Path) -> None:
        self._collect(folder, "checkpoint")

    def restore(self, checkpoint: Path) -> None:
        """As the protocol: file by file to the machines of all ranks."""
        for path in part_files(checkpoint):
            self._send(path, path.name)
        self._all("take_up")

    def close(self) -> None:
        for worker in self.hired:
            worker.stop()
        remove_placement_group(self.group)

    def _reserve(self) -> Any:
        """Room for all workers, each its own; on one machine where that is possible."""
        resources = self.ctx.online.resources
        if resources.training.count > 1 and 0 < resources.training.gpus < 1:
            raise StageError(
                f"resources.training.gpus = {resources.training.gpus:g}: NCCL wants a GPU of its own for each of several ranks; "
                "set gpus to 1, or to 0 to train on CPUs"
            )
        bundles = [_bundle(workers) for role in ROLES for workers in [self.workers(role)] * self.workers(role).count]
        asked = {kind: sum(bundle.get(kind, 0) for bundle in bundles) for kind in ("CPU", "GPU")}
        there = ray.cluster_resources()
        listed = ", ".join(f"{role} {workers.count} x {workers.cpus:g} CPU {workers.gpus:g} GPU" for role, workers in resources)
        for kind, wanted in asked.items():
            if wanted > there.get(kind, 0):
                raise StageError(
                    f"{self.ctx.label} asks for {wanted:g} {kind} ({listed}) and Ray has {there.get(kind, 0):g}: lower "
                    f"resources.*.{kind.lower()}s, where a fraction shares one, or resources.*.count; or give Ray more machines"
                )
        group = placement_group(bundles, strategy="PACK")
        if not group.wait(PLACED):
            remove_placement_group(group)
            raise StageError(
                f"{self.ctx.label} asks for {listed} and found no room for {PLACED} s: others hold {_in_use(there)}, or no "
                "machine is large enough for its share; end them, or lower resources"
            )
        return group

    def _open(self) -> None:
        """Begin all workers at once, and wait until they can work."""
        ranks = [_Worker(self, "training", rank) for rank in range(self.workers("training").count)]
        self.training: Sequence[Worker] = ranks
        self.hired += ranks
        meeting = ranks[0].actor.meeting.remote()
        for worker in ranks:
            worker.open(open_rank, self.ctx, self.folders, worker.index, meeting)
        for role in ROLES[1:]:
            self.first |= {(role, index): self._hire(role, index) for index in range(self.workers(role).count)}
        self._wait_until_opened(list(self.hired))
        self.steps_before: int = self._ask("steps_before")
        if self.ctx.online.transfer == "broadcast":
            self.broadcast = Broadcast(self, ranks[0], self._rollout_workers)

    def _hire(self, role: Role, index: int) -> _Worker:
        worker = _Worker(self, role, index)
        self.hired.append(worker)
        worker.open(open_generator if role == "rollout" else open_judge, self.ctx, self.folders, index)
        return worker

    def _rollout_workers(self) -> list[_Worker]:
        """The last one of each number; it has replaced those before it."""
        return list({worker.index: worker for worker in self.hired if worker.role == "rollout"}.values())

    def _wait_until_opened(self, workers: list[_Worker]) -> None:
        waiting = {worker.opened: worker for worker in workers}
        while waiting:
            (opened,), _ = ray.wait(list(waiting), fetch_local=False)
            worker = waiting.pop(opened)
            try:
                self.report(_Call((), opened, worker))
            except WorkerDied as error:
                raise StageError(f"{error}; it died while it loaded: look at the memory of its machine") from error

    def _look_after_training(self, ended: list[Call], calls: Sequence[Call]) -> None:
        """Raise what a rank raised: at once if it is gone, and otherwise once the others had the time to say more."""
        if not any(map(self.failure, _of_training(ended))):
            return
        ranks = _of_training(calls)
        deaths = [error for call in _of_training(ended) if isinstance(error := self.failure(call), TrainingDied)]
        if not deaths:
            reports = [call.report for call in ranks]
            ray.wait(reports, num_returns=len(reports), timeout=GRACE, fetch_local=False)
        errors = [error for call in ranks if call.report in _ended([call.report]) and (error := self.failure(call))]
        first = next((error for error in errors if isinstance(error, TrainingDied)), errors[0])
        for other in errors:
            if other is not first and str(other) != str(first):
                first.add_note(f"another rank: {other}")
        raise first

    def failure(self, call: Call) -> Exception | None:
        """What an ended call raised."""
        try:
            self.report(call)
        except Exception as error:
            return error
        return None

    def _death(self, worker: _Worker, error: RayError) -> RuntimeError:
        reason = str(error).strip().splitlines()[0]
        if worker.role != "training":
            return WorkerDied(f"{worker.role} worker {worker.index}: {reason}")
        return TrainingDied(
            f"training rank {worker.index} of {self.ctx.label} died in step {self.step} ({reason}): what the stage had learnt "
            "since its start or its last checkpoint is lost. Start it again; if that goes wrong too, look at the memory of the "
            "rank's machine, or lower the stage's micro_batch"
        )

    def _wait_for(self, calls: Sequence[Call]) -> None:
        waiting = list(calls)
        while waiting:
            ended = self.wait(waiting, None)
            waiting = [call for call in waiting if call not in ended]

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        """What every rank says."""
        calls = [rank.start(method, *arguments) for rank in self.training]
        self._wait_for(calls)
        return [self.report(call) for call in calls]

    def _ask(self, method: str, *arguments: Any) -> Any:
        """What rank 0 says."""
        return self.report(self.training[0].start(method, *arguments))

    def _send(self, path: Path, name: str) -> None:
        """A file to all ranks."""
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                self._all("append", name, ray.put(np.frombuffer(chunk, np.uint8)))

    def _collect(self, folder: Path, method: str, *arguments: Any) -> None:
        """What all ranks write with a method, each on its own machine, into a folder on this one."""
        written = self._all("write", method, *arguments)
        for rank, files in zip(self.training, written, strict=True):
            for name, size in files:
                self._receive(rank, safe_join(folder, name), name, size)
        self._all("discard")

    def _receive(self, rank: Worker, path: Path, name: str, size: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for start in range(0, size, CHUNK):
                file.write(self.report(rank.start("read", name, start)).data)


def _bundle(workers: WorkersConfig) -> dict[str, float]:
    return {"CPU": workers.cpus} | ({"GPU": workers.gpus} if workers.gpus else {})


def _ended(reports: list[Any]) -> list[Any]:
    return ray.wait(reports, num_returns=len(reports), timeout=0, fetch_local=False)[0]


def _of_training(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if isinstance(call, _Call) and call.worker.role == "training"]


def _in_use(there: dict[str, float]) -> str:
    free, kinds = ray.available_resources(), [kind for kind in ("CPU", "GPU") if kind in there]
    return " and ".join(f"{there[kind] - free.get(kind, 0):g} of {there[kind]:g} {kind}" for kind in kinds)
