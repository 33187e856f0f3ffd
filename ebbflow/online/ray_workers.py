"""The workers of a stage as Ray actors: a training group, rollout workers and reward workers, each
a process of its own.

Rollouts, images and weights go from actor to actor through Ray's object store; the stage's own
process holds references to them and reads reports. Ray restarts nothing: the pools replace rollout
and reward workers and repeat their work, and a training rank that dies ends the stage.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, get_args

import numpy as np
import ray
from ray.exceptions import (
    ObjectLostError,
    OutOfMemoryError,
    OwnerDiedError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ebbflow.online.messages import Handle
from ebbflow.online.ray_actor import (
    CHUNK,
    Actor,
    ActorFolders,
    RayTrainingWorker,
    open_reward_worker,
    open_rollout_worker,
    open_training_worker,
    register_tensor_serializer,
)
from ebbflow.online.workers import (
    NUM_RETURNS,
    Arguments,
    Result,
    ResultLost,
    RewardPool,
    RolloutPool,
    StageError,
    TrainingGroup,
    WorkerDied,
)
from ebbflow.recipe.online import Role, WorkersConfig
from ebbflow.rollouts.weights import WeightsVersion
from ebbflow.stage import StageContext
from ebbflow.storage.artifacts import verify_folder, write_new_folder
from ebbflow.storage.disk import safe_join
from ebbflow.training.checkpoint import part_files

logger = logging.getLogger(__name__)

ROLES: tuple[Role, ...] = get_args(Role)
PLACEMENT_SECONDS = 300
"""Time for every worker to find room, and for one that replaces another."""
SAY_EVERY_SECONDS = 30
"""Between two lines of the log about a worker that is waited for."""
GRACE_SECONDS = 10
"""Time for the other ranks to say what went wrong, after one failed."""
LOST = (RayActorError, ObjectLostError, OutOfMemoryError)
"""What Ray raises when a process, or the machine with what it left behind, is gone."""


class RecoverableStageError(StageError):
    """Another attempt at the stage may succeed; it starts from the last checkpoint."""


class NoReplacement(RecoverableStageError):
    """A rollout or reward worker is gone, and no other found room or loaded in time: names what is
    missing.
    """


class ResultGone(ResultLost, RecoverableStageError):
    """As ``ResultLost``, where it cannot be made again: another attempt makes it."""


class TrainingDied(RecoverableStageError):
    """A rank of the training group is gone, and with it what the stage has learnt: names the rank
    and the step.
    """


class RayWorker:
    """An actor, as the stage's own process sees it."""

    def __init__(self, workers: RayWorkers, role: Role, index: int) -> None:
        self.workers = workers
        self.role = role
        self.index = index
        config = workers.resources_of_role(role)
        bundle = workers.bundle_index(role, index)
        self.opened: ray.ObjectRef[None]
        self.placed: ray.ObjectRef[bool]
        # An actor is created at once and placed by Ray later, so all workers start side by side.
        self.actor = Actor.options(
            num_cpus=config.cpus,
            num_gpus=config.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(workers.group, bundle),
        ).remote(role, config, sys.path)

    def start_opening(self, make: Callable[..., Any], *arguments: Any) -> None:
        """Start to make the worker inside the actor."""
        self.placed = self.actor.__ray_ready__.remote()
        self.opened = self.actor.open.remote(make, *arguments)

    async def call(
        self,
        method: Callable[Concatenate[Any, Arguments], Result],
        *arguments: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        num_returns = NUM_RETURNS.get(method.__name__, 1)
        remote_call = self.actor.call.options(num_returns=num_returns)
        returned = remote_call.remote(method.__name__, *arguments, **keywords)
        # Handles stay references into the object store; only the report comes to this process.
        *handles, report = returned if num_returns > 1 else [returned]
        try:
            answer: Any = await report
        except RayError as error:
            raise self._explain_error(error) from error
        if handles:
            answer = (*handles, answer)
        result: Result = answer
        return result

    def check_open(self) -> None:
        """Raise what went wrong while the worker loaded."""
        try:
            ray.get(self.opened)
        except RayError as error:
            cause = self._explain_error(error)
            if isinstance(cause, WorkerDied):
                raise StageError(
                    f"{cause}; it died while it loaded: check the memory of its machine"
                ) from error
            raise cause from error

    def check_alive(self, ended: Sequence[ray.ObjectRef[Any]]) -> None:
        """Raise ``WorkerDied`` if one of these ended because the process is gone. An error of its
        own is raised by its calls.
        """
        for reference in ended:
            try:
                ray.get(reference)
            except RayError as error:
                cause = self._explain_error(error)
                if isinstance(cause, WorkerDied):
                    raise cause from error

    def stop(self) -> None:
        ray.kill(self.actor)

    def _explain_error(self, error: RayError) -> BaseException:
        """The worker's own exception, or what its death means for the stage."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        if not isinstance(cause, LOST):
            return cause
        reason = str(cause).strip().splitlines()[0]
        # Ray loses an object with its owner. Only weights are owned by an actor, which is rank 0.
        owner_died = isinstance(cause, OwnerDiedError)
        if self.role != "rollout" and isinstance(cause, ObjectLostError) and not owner_died:
            return ResultGone(
                f"what {self.role} {self.index} was given is gone with the machine on which it lay"
                f" ({reason})"
            )
        if self.role != "training" and not owner_died:
            return WorkerDied(f"{self.role} worker {self.index}: {reason}")
        return TrainingDied(
            f"training rank {0 if owner_died else self.index} of {self.workers.ctx.stage_label}"
            f" died in step {self.workers.step} ({reason}): what the stage learnt since its start"
            " or its last checkpoint is lost. Start it again; if it dies again, check the memory"
            " of the rank's machine, or lower the stage's micro_batch"
        )


class RayWorkers:
    """``StageWorkers`` that are actors, with the cores and GPUs that the recipe gives each role.
    Handles are object references.

    Args:
        folders: where actors find what they load.
        context_parallel: ranks of the training group that share the tokens of each sample; rollout
            workers have samples whole.

    Raises:
        StageError: the cluster has no room for the workers, or one of them died while it loaded.
    """

    def __init__(self, ctx: StageContext, folders: ActorFolders, context_parallel: int = 1) -> None:
        self.ctx = ctx
        self.folders = folders
        self.context_parallel = context_parallel
        # From the recipe: no scorer is loaded in the stage's own process.
        recipe = ctx.branch_recipe
        self.reward_weights = {row.column: row.weight for row in recipe.rewards if row.weight}
        scorers = (*recipe.rewards, *recipe.guardrails)
        self.reads_rollouts = any(row.scores in ("latents", "sounds") for row in scorers)
        self.all: list[RayWorker] = []
        self.step = 0
        register_tensor_serializer()
        logger.info(
            "%s: starting %d Ray workers",
            ctx.stage_label,
            sum(self.resources_of_role(role).count for role in ROLES),
        )
        # Machines may still join a cluster that is there already; one of this process is whole.
        join_seconds = PLACEMENT_SECONDS if ray.is_initialized() else 0
        if not ray.is_initialized():
            ray.init(include_dashboard=False)
        self.group = self._reserve_resources(join_seconds)
        try:
            self._open_workers()
        except BaseException:
            self.close()
            raise

    def resources_of_role(self, role: Role) -> WorkersConfig:
        """What the recipe gives a role."""
        config: WorkersConfig = getattr(self.ctx.online_config.resources, role)
        return config

    def bundle_index(self, role: Role, index: int) -> int:
        """A worker's number among the workers of all roles."""
        return (
            sum(self.resources_of_role(other).count for other in ROLES[: ROLES.index(role)]) + index
        )

    async def publish_weights(self, version: int, copy: str | None = None) -> WeightsVersion:
        self.step = version
        return await self.training.publish(version, copy)

    async def fetch_value(self, handle: Handle) -> Any:
        try:
            return await handle
        except ObjectLostError as error:
            raise ResultGone(
                f"a result is gone with the machine on which it lay ({str(error).splitlines()[0]})"
            ) from error

    def put_value(self, value: Any) -> Handle:
        return ray.put(value)

    async def save_policy(self, folder: Path, *arguments: Any) -> None:
        """As the protocol: file by file from the machine of rank 0.

        Raises:
            ArtifactError: what arrived is not what rank 0 committed.
        """
        with write_new_folder(folder) as unfinished:
            await self._collect_files(unfinished, "save", *arguments)
            verify_folder(unfinished)

    async def save_checkpoint(self, folder: Path) -> None:
        await self._collect_files(folder, "save_checkpoint")

    async def load_checkpoint(self, folder: Path) -> None:
        """As the protocol: file by file to the machines of all ranks."""
        for path in part_files(folder):
            with path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    # Stored once, however many ranks fetch it.
                    stored: Handle = ray.put(np.frombuffer(chunk, np.uint8))
                    await self.training.call(RayTrainingWorker.append, path.name, stored)
        await self.training.call(RayTrainingWorker.load_received_checkpoint)

    def close(self) -> None:
        for worker in self.all:
            worker.stop()
        remove_placement_group(self.group)

    def _reserve_resources(self, join_seconds: float) -> Any:
        """Room for all workers, each its own; on one machine where that is possible.

        Args:
            join_seconds: to wait for machines of the cluster that are not there yet. KubeRay
                replaces a head that died and starts the job again before its workers have joined.
        """
        resources = self.ctx.online_config.resources
        bundles = []
        for role in ROLES:
            config = self.resources_of_role(role)
            bundles += [_build_bundle(config) for _ in range(config.count)]
        asked = {kind: sum(bundle.get(kind, 0) for bundle in bundles) for kind in ("CPU", "GPU")}
        listed = ", ".join(
            f"{role} {workers.count} x {workers.cpus:g} CPU {workers.gpus:g} GPU"
            for role, workers in resources
        )
        there = _wait_for_resources(asked, join_seconds)
        for kind, wanted in asked.items():
            if wanted > there.get(kind, 0):
                raise StageError(
                    f"{self.ctx.stage_label} asks for {wanted:g} {kind} ({listed}) and Ray has"
                    f" {there.get(kind, 0):g}: lower resources.*.{kind.lower()}s, where a fraction"
                    " shares one, or resources.*.count; or give Ray more machines"
                )
        group = placement_group(bundles, strategy="PACK")
        if not group.wait(PLACEMENT_SECONDS):
            remove_placement_group(group)
            raise StageError(
                f"{self.ctx.stage_label} asks for {listed} and found no room in {PLACEMENT_SECONDS}"
                f" s: others hold {_format_usage(there)}, or no machine is large enough for its"
                " share; end them, or lower resources"
            )
        return group

    def _open_workers(self) -> None:
        """Start all workers at once, and wait until they can work."""
        ranks = [
            RayWorker(self, "training", rank)
            for rank in range(self.resources_of_role("training").count)
        ]
        self.all += ranks
        rendezvous = ranks[0].actor.rendezvous.remote()
        for worker in ranks:
            worker.start_opening(
                open_training_worker,
                self.ctx,
                self.folders,
                worker.index,
                rendezvous,
                self.context_parallel,
            )
        rollouts = [
            self._start_worker("rollout", index)
            for index in range(self.resources_of_role("rollout").count)
        ]
        rewards = [
            self._start_worker("reward", index)
            for index in range(self.resources_of_role("reward").count)
        ]
        loading = {worker.opened: worker for worker in self.all}
        # In the order in which they end: a rank whose peer died would wait for it.
        while loading:
            (opened,), _ = ray.wait(list(loading), fetch_local=False)
            loading.pop(opened).check_open()
        self.training = TrainingGroup(ranks, GRACE_SECONDS)
        self.rollout = RolloutPool(
            rollouts,
            partial(self._replace_worker, "rollout"),
            self.ctx.online_config.rollout_timeout,
        )
        self.reward = RewardPool(
            rewards, partial(self._replace_worker, "reward"), self.ctx.online_config.scoring
        )
        self.steps_before: int = ray.get(ranks[0].actor.call.remote("steps_before"))

    def _start_worker(self, role: Role, index: int) -> RayWorker:
        """A rollout or reward worker; it loads while the stage does something else."""
        worker = RayWorker(self, role, index)
        self.all.append(worker)
        worker.start_opening(
            open_rollout_worker if role == "rollout" else open_reward_worker,
            self.ctx,
            self.folders,
            index,
        )
        return worker

    async def _replace_worker(self, role: Role, index: int) -> RayWorker:
        """A worker in place of one that is gone, once it is open. What else goes wrong while it
        loads, its first call raises.

        One that dies before it is open is replaced in turn, for it may have started on a machine
        whose end Ray had not noticed.

        Raises:
            NoReplacement: none was open, or had at least found room and still loads, in
                ``PLACEMENT_SECONDS``.
        """
        start = time.monotonic()
        while True:
            worker = self._start_worker(role, index)
            try:
                await self._wait_until_open(worker, start)
                return worker
            except WorkerDied as death:
                worker.stop()
                if time.monotonic() - start > PLACEMENT_SECONDS:
                    raise self._build_no_replacement(
                        worker, f"others died while they loaded (the last: {death})"
                    ) from death
                logger.warning(
                    "%s worker %d died before it was open, and another is started (%s)",
                    role,
                    index,
                    death,
                )

    async def _wait_until_open(self, worker: RayWorker, start: float) -> None:
        """Wait until a worker is open, and say so every now and then. Only the time until it has
        room is limited.
        """
        waited_for = [worker.placed, worker.opened]
        while waited_for:
            ended, waited_for = await asyncio.to_thread(
                ray.wait,
                waited_for,
                num_returns=len(waited_for),
                timeout=SAY_EVERY_SECONDS,
                fetch_local=False,
            )
            worker.check_alive(ended)
            seconds = time.monotonic() - start
            placed = worker.placed not in waited_for
            if not placed and seconds > PLACEMENT_SECONDS:
                worker.stop()
                raise self._build_no_replacement(worker, "no machine had room for another")
            if waited_for:
                doing = (
                    "loads"
                    if placed
                    else f"waits for {_format_bundle(self.resources_of_role(worker.role))}"
                )
                logger.info("%s worker %d %s (%.0f s)", worker.role, worker.index, doing, seconds)

    def _build_no_replacement(self, worker: RayWorker, why: str) -> NoReplacement:
        there = ray.cluster_resources()
        return NoReplacement(
            f"{worker.role} worker {worker.index} of {self.ctx.stage_label} is gone, and in"
            f" {PLACEMENT_SECONDS} s {why}: it asks for"
            f" {_format_bundle(self.resources_of_role(worker.role))}, and others hold"
            f" {_format_usage(there)}. Give Ray the machine back, or lower"
            f" resources.{worker.role}.count; the stage starts again from its last checkpoint"
        )

    async def _collect_files(self, folder: Path, method: str, *arguments: Any) -> None:
        """What all ranks write with a method, each on its own machine, into a folder on this
        one."""
        written = await self.training.call(RayTrainingWorker.write, method, *arguments)
        for rank, files in zip(self.training.ranks, written, strict=True):
            for name, size in files:
                path = safe_join(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    for start in range(0, size, CHUNK):
                        chunk = await rank.call(RayTrainingWorker.read, name, start)
                        file.write(chunk.data)
        await self.training.call(RayTrainingWorker.discard)


def _format_bundle(workers: WorkersConfig) -> str:
    return " and ".join(f"{count:g} {kind}" for kind, count in _build_bundle(workers).items())


def _build_bundle(workers: WorkersConfig) -> dict[str, float]:
    return {"CPU": workers.cpus} | ({"GPU": workers.gpus} if workers.gpus else {})


def _wait_for_resources(asked: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Wait until a cluster has what is asked for, or the time is over; what it then has."""
    deadline = time.monotonic() + seconds
    next_line = time.monotonic()
    while True:
        there: dict[str, float] = ray.cluster_resources()
        missing = [kind for kind, wanted in asked.items() if wanted > there.get(kind, 0)]
        now = time.monotonic()
        if not missing or now >= deadline:
            return there
        if now >= next_line:
            kinds = ", ".join(
                f"{there.get(kind, 0):g} of {asked[kind]:g} {kind}" for kind in missing
            )
            logger.info("Ray has %s: waiting up to %.0f s for machines", kinds, deadline - now)
            next_line = now + SAY_EVERY_SECONDS
        time.sleep(1)


def _format_usage(there: dict[str, float]) -> str:
    free = ray.available_resources()
    kinds = [kind for kind in ("CPU", "GPU") if kind in there]
    return " and ".join(
        f"{there[kind] - free.get(kind, 0):g} of {there[kind]:g} {kind}" for kind in kinds
    )
