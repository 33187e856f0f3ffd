"""Weights from the first rank of training to all rollout workers at once, by a collective of their own.

The group has nothing to do with the one that training shards its model over. Its members meet at a store that the first of them
serves, and every transfer begins there: nobody enters a collective before all are there, so one that is missing is named, and the
others are not caught. After an error a group is of no use: its members leave it and join one of another name.

NCCL carries it where every member has a GPU of its own, which is all that NCCL allows, and gloo otherwise.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ebbflow.rollouts.weights import Tensors, TransferError, WeightsVersion, bucketize

BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
OFF = "off"
"""Key of a group that nobody should wait for any more."""
LOOK = 0.02
"""Seconds until a member that waits looks again."""
WAY_OUT = (
    "the group is of no use any more; replace workers that died and let all members join one of another name, allow more time if "
    "they are only busy, name the network between the machines (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or set transfer: store"
)


class BroadcastError(RuntimeError):
    """A transfer that came to nothing: names the group, the rank, who is missing and the way out."""


@dataclass(frozen=True)
class Group:
    """This process among those that weights are sent between; rank 0 sends, all others receive.

    Attributes:
        timeout: seconds that it waits for another member.
        store: where the members meet.
        backend: the collective, over tensors on ``device``.
        transfers: their numbers, in step on all members.
    """

    name: str
    rank: int
    world: int
    timeout: float
    store: dist.Store
    backend: Any
    device: torch.device
    transfers: Iterator[int] = field(default_factory=count)


def serve(address: str) -> dist.TCPStore:
    """Where members meet, in the process of rank 0, for as long as this is kept; its ``port`` is a free one.

    Args:
        address: of this machine, as the other members reach it.
    """
    return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)


def join(address: str, port: int, name: str, rank: int, world: int, timeout: float) -> Group:
    """Join a group of a name that no group had before; waits for all its members.

    Args:
        timeout: seconds, here and for every wait later.

    Raises:
        BroadcastError: the store or a member is not there in time.
    """
    limit = timedelta(seconds=timeout)
    with _explained(name, rank, f"finds no store at {address}:{port}"):
        store = dist.PrefixStore(name, dist.TCPStore(address, port, timeout=limit, wait_for_workers=False))
    alone = Group(name, rank, world, timeout, store, None, torch.device("cpu"))
    store.set(f"gpu/{rank}", _gpu())
    _await(alone, "gpu", range(world))
    gpus = {store.get(f"gpu/{other}").decode() for other in range(world)}
    with _explained(name, rank, "cannot connect to the others"):
        if len(gpus - {""}) < world:
            return replace(alone, backend=dist.ProcessGroupGloo(store, rank, world, limit))
        return replace(alone, backend=_nccl(store, rank, world, limit), device=torch.device("cuda", torch.cuda.current_device()))


def abort(store: dist.Store, name: str) -> None:
    """Let nobody wait at the store for other members of a group: one of them is known to be gone."""
    dist.PrefixStore(name, store).set(OFF, "")


def leave(group: Group) -> None:
    """Let go of the connections, whatever is under way."""
    group.backend.abort()


def specs(tensors: Mapping[str, Tensor]) -> Tensors:
    """Shapes and types by name, without values: what a receiver must know beforehand."""
    return {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in tensors.items()}


def send(group: Group, weights: WeightsVersion) -> None:
    """Send weights from rank 0 to all others, a bucket at a time.

    Args:
        weights: their buckets are tensors, in the parts and the order of ``bucketize``.

    Raises:
        BroadcastError: a member does not come for them in time, or goes away.
    """
    number = next(group.transfers)
    _await(group, f"{number}/ready", range(1, group.world))
    group.store.set(f"{number}/header/0", json.dumps(asdict(replace(weights, buckets=()))))
    for bucket in weights.buckets:
        _broadcast(group, _flat(bucket).to(group.device))


def receive(group: Group, expected: Tensors) -> tuple[WeightsVersion, Tensors]:
    """What rank 0 sends next: (its version and digest, all tensors, on the CPU and checked).

    Args:
        expected: ``specs`` of what is sent, in its order.

    Raises:
        TransferError: something was lost or changed on the way, or other tensors were sent.
        BroadcastError: nothing is sent in time, or another member goes away.
    """
    number = next(group.transfers)
    group.store.set(f"{number}/ready/{group.rank}", "")
    _await(group, f"{number}/header", [0])
    weights = WeightsVersion(**json.loads(group.store.get(f"{number}/header/0")))
    size = sum(value.nbytes for value in expected.values())
    if size != weights.size:
        raise TransferError(
            f"rank {group.rank} of {group.name!r} expects {size} bytes and is sent {weights.size} (version {weights.version}): "
            "its engine has other parameters than the policy that trains"
        )
    buckets = []
    for bucket in bucketize(expected):
        flat = torch.empty(sum(value.nbytes for value in bucket.values()), dtype=torch.uint8, device=group.device)
        _broadcast(group, flat)
        buckets.append(_whole(flat.cpu(), bucket))
    return weights, replace(weights, buckets=tuple(buckets)).receive(lambda bucket: bucket)


def _broadcast(group: Group, flat: Tensor) -> None:
    with _explained(group.name, group.rank, "lost another one in the middle of a transfer"):
        group.backend.broadcast(flat, 0).wait()


def _flat(bucket: Tensors) -> Tensor:
    """The bytes of all tensors."""
    return torch.cat([value.contiguous().reshape(-1).view(torch.uint8) for value in bucket.values()])


def _whole(flat: Tensor, expected: Tensors) -> Tensors:
    """The inverse of ``_flat``."""
    parts = flat.split([value.nbytes for value in expected.values()])
    # A copy of each, because a view as another type must begin at a multiple of its size.
    return {name: part.clone().view(of.dtype).view(of.shape) for part, (name, of) in zip(parts, expected.items(), strict=True)}


def _await(group: Group, key: str, ranks: Sequence[int]) -> None:
    """Wait until each of the ranks has set its own key, or the group is called off."""
    end = time.monotonic() + group.timeout
    with _explained(group.name, group.rank, "lost the store, which the first rank of training serves"):
        while missing := [rank for rank in ranks if not group.store.check([f"{key}/{rank}"])]:
            late = time.monotonic() > end
            if late or group.store.check([OFF]):
                break
            time.sleep(LOOK)  # the store's own way to wait cannot be called off
    if missing:
        waited = f"waited {group.timeout:g} s" if late else "was told to wait no longer"
        whom = f"rank {', '.join(map(str, missing))} of {group.world}"
        raise BroadcastError(f"rank {group.rank} of {group.name!r} {waited} for {whom}: {WAY_OUT}")


@contextmanager
def _explained(name: str, rank: int, problem: str) -> Iterator[None]:
    """Errors of the network say whose they are."""
    try:
        yield
    except RuntimeError as error:
        raise BroadcastError(f"rank {rank} of {name!r} {problem} ({str(error).splitlines()[0]}): {WAY_OUT}") from error


def _gpu() -> str:
    """Which GPU this process is on, whatever its number here."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if torch.cuda.is_available() else ""


def _nccl(store: dist.Store, rank: int, world: int, limit: timedelta) -> Any:
    """NCCL whose ``wait`` waits and raises: by default a thread of its own ends the process when another member is gone."""
    before = os.environ.get(BLOCKING)
    os.environ[BLOCKING] = "1"  # read when the group is made
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, world, options)
    finally:
        del os.environ[BLOCKING]
        os.environ |= {} if before is None else {BLOCKING: before}
