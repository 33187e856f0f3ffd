"""The process group of a training task, on one machine or several.

An elastic launcher numbers the ranks of a machine one after another. Where there are several
machines, a rank that another one leaves alone raises ``PeerLost``: the stage can start again from
its last checkpoint. A rank that fails with an error of its own writes it into the store of the
group first, so that the others say that error instead.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _abort_process_group

from ebbflow.compute import choose_rank_gpu
from ebbflow.resume import InterruptedAttempt
from ebbflow.storage.disk import create_private_folder
from ebbflow.training.heartbeats import exchange_heartbeats

logger = logging.getLogger(__name__)

STORE = "EBBFLOW_RANKS_STORE"
"""Environment variable: the file through which the ranks of one machine find each other, instead of
through a port.
"""
LAUNCHED = "EBBFLOW_RANKS_LAUNCHED"
"""Environment variable: when the launcher began to start the ranks, in seconds since 1970."""
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
TIMEOUT_MINUTES = 30
"""A rank that hangs ends the others after this long. They also wait for the one that downloads a
model or stores a large checkpoint, so minutes are too few: 100 GiB at 100 MiB/s take 17.
"""
TIMEOUT = timedelta(minutes=TIMEOUT_MINUTES)
BUCKET = 256 * 2**20
"""Bytes of gradients that are averaged in one message."""
CHUNK = 64 * 2**20
"""Bytes of a file that are sent at a time."""
FAILED = "ebbflow/failed"
"""Key of the group's store: the error of the first rank that failed by itself."""
GLOO = "/gloo/transport/"
"""What gloo's errors about a connection name; they have no type of their own."""


TIMED_OUT = re.compile(r"tim(?:ed|e)[ -]?out", re.IGNORECASE)
"""What gloo's, the store's and NCCL's errors say of a time-out."""
WARN_BEFORE = timedelta(seconds=20)
"""How long before NCCL's time-out the phase is logged."""


class PeerLost(InterruptedAttempt):
    """A rank on another machine is gone, and left no error of its own: another attempt may
    succeed."""


class JointExit(RuntimeError):
    """An error that all ranks raise together, after their last collective: none waits for another,
    and none has anything to tell the others.
    """


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together.

    Example: rank 5 of 8 on two machines::

        ranks = Ranks(rank=5, world=8)  # LOCAL_WORLD_SIZE is 4
        ranks.node_rank, ranks.local_rank  # (1, 1)
        ranks.row_ranks(context_parallel=2)  # Ranks(rank=2, world=4)
    """

    rank: int
    world: int

    @staticmethod
    def current() -> Ranks:
        if not dist.is_initialized():
            return Ranks(0, 1)
        return Ranks(dist.get_rank(), dist.get_world_size())

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each machine, as the launcher says; all of them where it says nothing."""
        return min(self.world, int(os.environ.get("LOCAL_WORLD_SIZE", self.world)))

    @property
    def num_nodes(self) -> int:
        return self.world // self.ranks_per_node

    @property
    def node_rank(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        """Its number among those of its machine."""
        return self.rank % self.ranks_per_node

    def row_ranks(self, context_parallel: int) -> Ranks:
        """This process among those with rows of their own, where so many that follow each other
        share the tokens of a row.
        """
        return Ranks(self.rank // context_parallel, self.world // context_parallel)

    def wait_for_all(self) -> None:
        """Wait for all of them."""
        if self.world > 1:
            dist.barrier()


@dataclass
class Phase:
    """What the ranks do now, for the errors of those that wait in vain.

    Example:
        ``Phase("saving the checkpoint of step 40", 1200.5)``
    """

    name: str = "starting"
    since: float = 0.0
    """``time.monotonic()`` at its beginning."""


_phase = Phase()


def enter_phase(name: str) -> None:
    """Say what this rank does from now on, as a participle: "loading the policy"."""
    global _phase
    _phase = Phase(name, time.monotonic())


@contextmanager
def _name_phase_of_timeout() -> Iterator[None]:
    """Name the phase in errors of collectives that took too long."""
    try:
        yield
    except Exception as error:
        if is_connection_error(error) and TIMED_OUT.search(str(error)):
            error.add_note(
                f"Another rank did not come within {TIMEOUT_MINUTES} minutes (TIMEOUT_MINUTES)"
                f" while this one was {_phase.name}; see the logs of the other ranks for where they"
                " hang."
            )
        raise


@contextmanager
def _log_phase_before_abort() -> Iterator[None]:
    """Log the phase shortly before NCCL's time-out: NCCL then ends the process from a thread of its
    own, and no Python code runs after that.
    """
    ended = threading.Event()

    def watch() -> None:
        logged: Phase | None = None
        while not ended.wait(WARN_BEFORE.total_seconds() / 4):
            phase = _phase
            waited = time.monotonic() - phase.since
            if phase is not logged and waited > (TIMEOUT - WARN_BEFORE).total_seconds():
                logged = phase
                logger.warning(
                    "this rank has been %s for %d minutes; if it waits for another rank in a"
                    " collective, NCCL ends it at %d minutes (TIMEOUT_MINUTES)",
                    phase.name,
                    waited / 60,
                    TIMEOUT.total_seconds() / 60,
                )

    thread = threading.Thread(target=watch, name="ebbflow-phase", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def choose_backend(main_memory: bool) -> str:
    """Choose the backend of a group: gloo on CPUs, NCCL on GPUs, and both where ranks with GPUs
    also exchange tensors that wait in main memory.
    """
    if not torch.cuda.is_available():
        return "gloo"
    return "cpu:gloo,cuda:nccl" if main_memory else "nccl"


@contextmanager
def join_process_group(
    main_memory: bool = False, backend: str | None = None, timeout: timedelta | None = None
) -> Iterator[Ranks]:
    """Join the group that an elastic launcher announced in the environment; alone without one.

    Where the launcher names a file (``STORE``), all ranks are on this machine, and nothing listens
    on other interfaces than loopback. Otherwise they meet as ``torchrun`` says, at ``MASTER_ADDR``
    and ``MASTER_PORT``.

    Args:
        main_memory: as of ``choose_backend``.
        backend: instead of the one that ``choose_backend`` chooses.
        timeout: of collectives; default: ``TIMEOUT``.

    Raises:
        PeerLost: a rank on another machine is gone.
        RuntimeError: a rank on another machine failed; its error is named.
    """
    if "RANK" not in os.environ:
        yield Ranks(0, 1)
        return
    enter_phase("starting")
    # NCCL's flight recorder: at a time-out every rank writes its last collectives to a file.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(create_private_folder() / "flight_rank_"))
    device = choose_rank_gpu(int(os.environ["LOCAL_RANK"]))
    backend = backend or choose_backend(main_memory)
    has_nccl = device is not None and "nccl" in backend
    store, rank, world = _open_store()
    # The launcher sees how each rank on its own machine ends: nobody has to name a lost one there.
    naming_errors = nullcontext() if os.environ.get(STORE) else _name_lost_peers(store, rank)
    try:
        with naming_errors, nullcontext() if timeout else _name_phase_of_timeout():
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=world,
                timeout=timeout or TIMEOUT,
                # NCCL connects at once, and a rank that cannot says so here. Without it NCCL
                # guesses the GPU of a rank from its number at the first barrier.
                device_id=device if has_nccl else None,
            )
            with (
                exchange_heartbeats(store, rank, world, lambda: _phase.name),
                _log_phase_before_abort() if has_nccl else nullcontext(),
            ):
                yield Ranks.current()
            dist.destroy_process_group()
    except JointExit:
        # As at the end of a stage: another rank may still receive what this one sent last.
        dist.destroy_process_group()
        raise
    except BaseException:
        # After ``naming_errors``: the others look for this error when their connections break.
        if dist.is_initialized():
            leave_failed_group()
        raise


def _open_store() -> tuple[Store, int, int]:
    """Open the store in which the ranks meet; with it this rank and their number."""
    path = os.environ.get(STORE)
    if path:
        # All ranks are on this machine: nothing has to listen on its other interfaces.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
        rank = int(os.environ["RANK"])
        world = int(os.environ["WORLD_SIZE"])
        return dist.FileStore(path, world), rank, world  # type: ignore[attr-defined]
    # A rank that never comes is named here, before there is a store to look for its error.
    with _name_lost_peers():
        store, rank, world = next(dist.rendezvous("env://", timeout=TIMEOUT))  # type: ignore[attr-defined]
    return store, rank, world


def leave_failed_group() -> None:
    """Leave the process group after an error, without a wait for the other ranks.

    ``destroy_process_group`` first lets NCCL finish what is in flight. After an exception on this
    rank alone that is a collective which the others have entered and this one never will: all of
    them would wait until the time-out, and this rank's error would be seen only then.
    """
    if "nccl" in dist.get_backend():
        _abort_process_group()
    else:
        dist.destroy_process_group()  # gloo has nothing to finish


@contextmanager
def _name_lost_peers(store: Store | None = None, rank: int = 0) -> Iterator[None]:
    """Say why a connection broke, and tell the others of an error of this rank."""
    try:
        yield
    except JointExit:
        raise
    except Exception as error:
        failure = _read_failure(store)
        if not is_connection_error(error):
            # An error of this rank: written down once, for the others, which will only see that the
            # connection to this one broke. The store may be gone with the machine that holds it.
            if store and not failure:
                with suppress(RuntimeError):
                    store.set(FAILED, f"rank {rank} failed: {type(error).__name__}: {error}")
            raise
        if failure:
            raise RuntimeError(failure) from error
        raise PeerLost(
            "a rank on another machine is gone, or cannot be reached; the stage starts again from"
            f" its last checkpoint (while {_phase.name}: {str(error).partition('. ')[0]})"
        ) from error


def _read_failure(store: Store | None) -> str | None:
    """Read what the first rank said that failed by itself, if the machine that holds the store is
    still there.
    """
    with suppress(RuntimeError):
        if store and store.check([FAILED]):
            return str(store.get(FAILED), "utf-8")
    return None


def is_connection_error(error: Exception) -> bool:
    """Return whether this is an error of torch about its connections to other processes."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and GLOO in str(error)
    )


def seconds_since_launch() -> float:
    """Return the wall time since the launcher began to start this process; 0 without one."""
    return time.time() - float(os.environ[LAUNCHED]) if LAUNCHED in os.environ else 0.0


def sum_over_processes(value: Tensor) -> Tensor:
    """Sum a tensor over the processes that train together, in place."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def average_over_processes(values: Sequence[Tensor]) -> None:
    """Average tensors over the processes that train together, in place and in buckets, so that many
    small ones take few messages.
    """
    world = Ranks.current().world
    buckets: list[list[Tensor]] = [[]]
    size = 0
    for value in values:
        if size + value.nbytes > BUCKET and buckets[-1]:
            buckets.append([])
            size = 0
        buckets[-1].append(value)
        size += value.nbytes
    for bucket in buckets:
        joined = torch.cat([value.flatten() for value in bucket])
        dist.all_reduce(joined)
        joined /= world
        parts = joined.split([value.numel() for value in bucket])
        for value, part in zip(bucket, parts, strict=True):
            value.copy_(part.view_as(value))


def all_reduce_max(local_value: int) -> int:
    """Return the largest of what all processes have; all of them ask."""
    value = _exchange_tensor(local_value)
    if dist.is_initialized():
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return int(value)


def broadcast_first(local_value: int) -> int:
    """Return what rank 0 has; all of them ask."""
    value = _exchange_tensor(local_value)
    if dist.is_initialized():
        dist.broadcast(value, 0)
    return int(value)


def broadcast_first_of_node(local_value: int) -> int:
    """Return what the first rank of this machine has; all processes ask."""
    if not dist.is_initialized():
        return local_value
    ranks = Ranks.current()
    value = _exchange_tensor(local_value)
    # Gathered from everyone and then chosen from: a group for each machine would be one more thing
    # that all ranks have to create in the same order.
    values = [torch.empty_like(value) for _ in range(ranks.world)]
    dist.all_gather(values, value)
    return int(values[ranks.rank - ranks.local_rank])


def build_replica_mesh(replicas: int) -> DeviceMesh | None:
    """Build the mesh of HSDP: so many replicas of the model, each sharded over ranks that follow
    each other. None: one replica.

    Raises:
        ValueError: the ranks cannot be divided into so many replicas.
    """
    if replicas == 1:
        return None
    world = Ranks.current().world
    if world % replicas:
        raise ValueError(
            f"{world} ranks cannot be {replicas} replicas of the model; give each machine as many"
            " processes"
        )
    return init_device_mesh(
        _exchange_device(), (replicas, world // replicas), mesh_dim_names=("replicate", "shard")
    )


def build_row_mesh(context_parallel: int) -> DeviceMesh:
    """Build the mesh of context parallelism: so many ranks that follow each other share the tokens
    of a row.

    Raises:
        ValueError: the ranks cannot be divided into such groups.
    """
    world = Ranks.current().world
    if world % context_parallel:
        raise ValueError(
            f"{world} ranks cannot be groups of {context_parallel}; change the number of processes"
        )
    names = ("rows", "ring", "ulysses")  # the last two as diffusers calls them; no ring attention
    return init_device_mesh(
        _exchange_device(), (world // context_parallel, 1, context_parallel), mesh_dim_names=names
    )


def send_file(path: Path, receiver: int) -> None:
    """Send a file to the rank that calls ``receive_file``."""
    dist.send(_exchange_tensor(path.stat().st_size), receiver)
    with path.open("rb") as file:
        while chunk := bytearray(file.read(CHUNK)):  # writable, as ``frombuffer`` wants it
            dist.send(torch.frombuffer(chunk, dtype=torch.uint8).to(_exchange_device()), receiver)


def receive_file(path: Path, sender: int) -> None:
    """Write the file that a rank sends."""
    size = _exchange_tensor(0)
    dist.recv(size, sender)
    with path.open("wb") as file:
        for start in range(0, int(size), CHUNK):
            chunk = torch.empty(
                min(CHUNK, int(size) - start), dtype=torch.uint8, device=_exchange_device()
            )
            dist.recv(chunk, sender)
            file.write(chunk.cpu().numpy().data)


def _exchange_tensor(value: int) -> Tensor:
    return torch.tensor(value, device=_exchange_device())


def _exchange_device() -> str:
    """Return the device of tensors that ranks exchange: NCCL takes those of GPUs only."""
    return "cuda" if dist.is_initialized() and "nccl" in dist.get_backend() else "cpu"
