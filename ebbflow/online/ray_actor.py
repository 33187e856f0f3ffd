"""What runs in a Ray actor of an online stage: the actor of any worker, and the worker of each role
that opens there.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from ray.util import register_serializer
from torch import Tensor

from ebbflow.compute import GPUS, require_gpu, set_up_process
from ebbflow.online.sample_workers import RewardWorker, RolloutWorker
from ebbflow.online.training_worker import TrainingWorker
from ebbflow.online.workers import StageError
from ebbflow.recipe.online import Role, WorkersConfig
from ebbflow.recipe.rewards import select_trained
from ebbflow.rewards.combine import Scorer, load_scorer
from ebbflow.rollouts.engine import open_engine
from ebbflow.rollouts.generate import Diffusers
from ebbflow.rollouts.weights import WeightsVersion
from ebbflow.stage import StageContext
from ebbflow.storage.disk import safe_join
from ebbflow.storage.sources import check_sources
from ebbflow.training import distributed
from ebbflow.training.policy import Policy
from ebbflow.training.policy_io import load_policy, open_model
from ebbflow.training.policy_metadata import choose_policy_config
from ebbflow.training.update import PolicyUpdater
from ebbflow.watchdog import enable_stack_dumps

CHUNK = 64 * 2**20
"""Bytes of a file that travel at a time."""

Locate = Callable[[], Path]
"""Says where a folder lies on the machine that calls it, and brings it there if it must; travels to
other processes.
"""


@dataclass(frozen=True)
class ActorFolders:
    """Where actors find the base model, the policy that the stage starts from, and its teachers by
    their copies: ``StageFolders``, as functions that each machine calls for itself.

    Example:
        ``ActorFolders(partial(Path, "/shared/base"), partial(fetch_folder, "s3://runs/policy"))``:
        the base model is mounted on every machine, and each machine downloads the policy.
    """

    base: Locate
    policy: Locate
    teachers: Mapping[str, Locate] = field(default_factory=dict)

    @staticmethod
    def from_paths(
        base: Path, policy: Path, teachers: Mapping[str, Path] | None = None
    ) -> ActorFolders:
        """Folders that lie at these paths on every machine."""
        located = {copy: partial(Path, folder) for copy, folder in (teachers or {}).items()}
        return ActorFolders(partial(Path, base), partial(Path, policy), located)


class WorkerActor:
    """The process of a worker: opens it, and calls its methods."""

    def __init__(self, role: Role, workers: WorkersConfig, path: list[str]) -> None:
        """``path``: where the stage's own process imports from, as a user's own rewards and
        algorithms may lie there.
        """
        sys.path += [folder for folder in path if folder not in sys.path]
        check_sources()
        # As in the stage's own process; without it SIGUSR1 would end the actor.
        enable_stack_dumps()
        self.role = role
        self.workers = workers
        self.opened: Any = None
        self.failed: Exception | None = None

    def rendezvous(self) -> str:
        """Where the ranks of a training group rendezvous: a free port of this machine."""
        host = ray.util.get_node_ip_address()
        # Port 0 lets the system choose. The port is free again after the block, until rank 0 binds
        # it.
        with socket.socket() as free:
            free.bind((host, 0))
            return f"tcp://{host}:{free.getsockname()[1]}"

    def open(self, make: Callable[..., Any], ctx: StageContext, *arguments: Any) -> None:
        try:
            # First, because the others ask CUDA, and CUDA that has started hides no GPU any more.
            self._hide_other_gpus()
            # Before anything of torch runs: it sets threads and determinism for this process.
            set_up_process(ctx.recipe)
            self._claim_resources()
            self.opened = make(ctx, *arguments)
        except Exception as error:
            # Calls may already wait in the actor's queue; they raise the same error.
            self.failed = error
            raise

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        if self.failed:
            raise self.failed
        # A user's reward may write into its images, and nobody may write into Ray's object store.
        writable = [
            argument.copy() if isinstance(argument, np.ndarray) else argument
            for argument in arguments
        ]
        return getattr(self.opened, method)(*writable, **keywords)

    def _hide_other_gpus(self) -> None:
        """Hide all GPUs from a worker that asked for none: Ray shows it every one of its machine.

        ``EBBFLOW_GPUS`` of the stage's own process does not count for it either.
        """
        if not self.workers.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            os.environ.pop(GPUS, None)

    def _claim_resources(self) -> None:
        """Take the cores and GPUs that are this worker's."""
        register_tensor_serializer()
        # torch warns of arrays that lie in Ray's store; they are only read.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        if self.workers.gpus:
            role = f"resources.{self.role}.gpus = {self.workers.gpus:g}"
            require_gpu(f"{role} on {socket.gethostname()}")
        # Ray shows an actor its own GPUs alone, so the first one is the right one.
        if torch.cuda.is_available():
            torch.cuda.set_device(0)
        if self.workers.cores:
            pin_to_cores(self.workers.cores, self.role)


Actor: Any = ray.remote(max_restarts=0, max_task_retries=0)(WorkerActor)


class RayTrainingWorker(TrainingWorker):
    """A rank of the training group whose results travel: weights as references, folders in
    chunks."""

    received: tempfile.TemporaryDirectory[str] | None = None

    def steps_before(self) -> int:
        return self.updater.before.steps

    def publish(self, version: int, copy: str | None = None) -> WeightsVersion:
        weights = super().publish(version, copy)
        # Put by the rank itself: a returned value would pass through the stage's own process.
        return replace(weights, buckets=tuple(ray.put(bucket) for bucket in weights.buckets))

    def write(self, method: str, *arguments: Any) -> list[tuple[str, int]]:
        """Write a folder on this machine; (name, bytes) of every file."""
        self.written = tempfile.TemporaryDirectory(prefix="ebbflow-")
        folder = self._written_folder
        folder.mkdir()
        getattr(self, method)(folder, *arguments)
        return [
            # Names and sizes only; the stage then reads the files in chunks, none of them whole in
            # memory.
            (path.relative_to(folder).as_posix(), path.stat().st_size)
            for path in folder.rglob("*")
            if path.is_file()
        ]

    def read(self, name: str, start: int) -> np.ndarray:
        """A chunk of a file, uint8."""
        with safe_join(self._written_folder, name).open("rb") as file:
            file.seek(start)
            return np.frombuffer(file.read(CHUNK), np.uint8)

    def discard(self) -> None:
        self.written.cleanup()

    def append(self, name: str, chunk: np.ndarray) -> None:
        """A further chunk of a checkpoint's file, uint8."""
        if self.received is None:
            self.received = tempfile.TemporaryDirectory(prefix="ebbflow-")
        path = safe_join(Path(self.received.name), name)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Chunks come in their order: the caller waits for each before it sends the next.
        with path.open("ab") as file:
            file.write(chunk.data)

    def load_received_checkpoint(self) -> None:
        """Continue from the checkpoint whose files have come."""
        assert self.received is not None
        self.load_checkpoint(Path(self.received.name))
        self.received.cleanup()

    @property
    def _written_folder(self) -> Path:
        return Path(self.written.name) / "folder"


def open_training_worker(
    ctx: StageContext,
    folders: ActorFolders,
    rank: int,
    rendezvous: str,
    context_parallel: int = 1,
) -> RayTrainingWorker:
    # A group of one needs no process group, and its policy is not sharded.
    world = ctx.online_config.resources.training.count
    if world > 1:
        dist.init_process_group(
            distributed.choose_backend(ctx.recipe.model.cpu_offload),
            rendezvous,
            timeout=distributed.TIMEOUT,
            world_size=world,
            rank=rank,
            # Ray shows an actor its own GPUs alone: the first one is this rank's.
            device_id=torch.device("cuda", 0) if torch.cuda.is_available() else None,
        )
    teachers = {copy: locate() for copy, locate in folders.teachers.items()}
    policy, metadata = load_policy(
        ctx,
        folders.base(),
        folders.policy(),
        teachers,
        shard=world > 1,
        context_parallel=context_parallel,
    )
    updater = PolicyUpdater(policy, ctx.online_config, metadata)
    return RayTrainingWorker(ctx, updater, metadata, rank, load_reward_gradients(ctx))


def load_reward_gradients(ctx: StageContext) -> Scorer | None:
    """Load the rewards that the algorithm of a stage learns from by their gradient, if it does.

    Those of weight 0 only score: a reward worker loads them, not the GPU that trains.
    """
    if not ctx.config.algorithm_kind.needs_reward_gradient:
        return None
    return load_scorer(select_trained(ctx.branch_recipe.rewards), ())


def open_rollout_worker(ctx: StageContext, folders: ActorFolders, index: int) -> RolloutWorker:
    if ctx.online_config.engine != "diffusers":
        return RolloutWorker(open_engine(ctx, folders.base()), index, ray.get)
    config = ctx.recipe.policy
    if config.train == "lora":
        # Of full training the folder is as large as the model, and its weights come over the wire.
        config = choose_policy_config(config, folders.policy())
    policy = Policy(open_model(ctx.recipe, folders.base()), config, ctx.recipe.seed)
    # The weights that arrive are those that generate, whichever copy of the trainer's they are.
    policy.copies.clear()
    return RolloutWorker(Diffusers(ctx, policy), index, ray.get)


def open_reward_worker(ctx: StageContext, folders: ActorFolders, index: int) -> RewardWorker:
    guardrails = ctx.recipe.guardrails if ctx.online_config.validation else ()
    return RewardWorker(load_scorer(ctx.branch_recipe.rewards, guardrails), index)


def pin_to_cores(cores: list[int], role: Role) -> None:
    """Keep all threads of this process, there and to come, on some cores."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue  # a thread that ended since
        except OSError as error:
            raise StageError(
                f"resources.{role}.cores = {cores}: {error}; this process may use"
                f" {sorted(os.sched_getaffinity(0))}"
            ) from error


def register_tensor_serializer() -> None:
    """Let this process send tensors as their bytes: torch's own way is many times slower and sends
    what a view does not show.
    """
    register_serializer(Tensor, serializer=_serialize_tensor, deserializer=_deserialize_tensor)


def _serialize_tensor(tensor: Tensor) -> tuple[np.ndarray, torch.dtype, torch.Size]:
    tensor = tensor.detach().cpu().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape


def _deserialize_tensor(sent: tuple[np.ndarray, torch.dtype, torch.Size]) -> Tensor:
    values, dtype, shape = sent
    # Copied: what lies in Ray's store cannot be written, and a tensor may be.
    return torch.from_numpy(values.copy()).view(dtype).reshape(shape)
