"""The process group of a training task."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

STORE = "EBBFLOW_RANKS_STORE"
"""Environment variable: the file through which the ranks of one machine find each other, instead of through a port."""
LAUNCHED = "EBBFLOW_RANKS_LAUNCHED"
"""Environment variable: when the launcher began to start the ranks, in seconds since 1970."""
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
TIMEOUT = timedelta(hours=1)
"""A rank that hangs ends the others after this long; they also wait for the one that brings and stores large checkpoints."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together."""

    rank: int
    world: int

    @staticmethod
    def current() -> Ranks:
        return Ranks(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Ranks(0, 1)

    def barrier(self) -> None:
        """Wait for all of them."""
        if self.world > 1:
            dist.barrier()


@contextmanager
def process_group() -> Iterator[Ranks]:
    """Join the group that an elastic launcher announced in the environment (gloo on CPUs, NCCL on GPUs); alone without one.

    Where the launcher names a file (``STORE``), all ranks are on this machine, and nothing listens on other interfaces than
    loopback. Otherwise they meet as ``torchrun`` says, at ``MASTER_ADDR`` and ``MASTER_PORT``.
    """
    if "RANK" not in os.environ:
        yield Ranks(0, 1)
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if path := os.environ.get(STORE):
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(path, world)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield Ranks.current()
    finally:
        dist.destroy_process_group()


def seconds_since_launch() -> float:
    """Wall time since the launcher began to start this process; 0 without one."""
    return time.time() - float(os.environ[LAUNCHED]) if LAUNCHED in os.environ else 0.0


def all_reduce_max(own: int) -> int:
    """The largest of what all processes have; all of them ask."""
    value = _shared(own)
    if dist.is_initialized():
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return int(value)


def first(own: int) -> int:
    """What rank 0 has; all of them ask."""
    value = _shared(own)
    if dist.is_initialized():
        dist.broadcast(value, 0)
    return int(value)


def _shared(own: int) -> Tensor:
    return torch.tensor(own, device="cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu")
