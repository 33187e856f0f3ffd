"""Weights on their way from training to the rollout workers: in buckets, with a version, checked on
arrival.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

BUCKET = 256 * 2**20
"""Bytes of a bucket; a tensor is never split, so one may be larger."""
HASHED_AT_ONCE = 16 * 2**20
"""Bytes that a thread hashes: adapters are one part, for which no thread is worth its start."""

Tensors = dict[str, Tensor]


class TransferError(RuntimeError):
    """What arrived is not what was sent: names the version and both checksums."""


@dataclass(frozen=True)
class WeightsVersion:
    """A version of the weights that generate.

    Example:
        After 3 training steps, 600 MB in 3 buckets that lie in Ray's store:
        ``WeightsVersion(3, "9f86d081...", (ref, ref, ref), 600_000_000)``. In one process the
        rollout worker shares the trainer's weights, and ``WeightsVersion(3)`` says all.

    Attributes:
        version: training steps of the stage that they have seen.
        digest: of all of them, by ``compute_checksum``; empty where the rollout worker shares the
            trainer's and nothing is sent.
        buckets: where to find them: tensors by name, or what fetches them in another process.
        size: bytes.
    """

    version: int
    digest: str = ""
    buckets: tuple[Any, ...] = ()
    size: int = 0

    def receive_tensors(self, fetch: Callable[[Any], Tensors]) -> Tensors:
        """All tensors, checked.

        Raises:
            TransferError: something was lost or changed on the way.
        """
        received: Tensors = {}
        # One bucket after the other, so that only one is in transit beside the tensors that have
        # come.
        for bucket in self.buckets:
            received |= fetch(bucket)
        arrived = compute_checksum(received)
        if arrived != self.digest:
            raise TransferError(
                f"the weights of version {self.version} arrived as {arrived[:12]} and were sent as"
                f" {self.digest[:12]} (sha256): nothing is generated with them; look at the memory"
                " and the network of the worker's machine"
            )
        return received


class AdaptersSize(NamedTuple):
    """What adapters add to the weights of a network.

    Attributes:
        layers: that are adapted.
        norm: Frobenius norm of all products together, with their scale.
    """

    layers: int
    norm: float


def measure_adapters(pairs: Iterable[tuple[Tensor, Tensor]], scale: float = 1.0) -> AdaptersSize:
    """Measure adapters without computing their products.

    Args:
        pairs: the factors A [rank, inputs] and B [outputs, rank] of each layer.
        scale: of every product.
    """
    layers = 0
    energy = 0.0
    for first, second in pairs:
        layers += 1
        # |B A|^2 is the trace of A A^T B^T B, of which each factor is [rank, rank].
        first_gram = first.detach().double() @ first.detach().double().T
        second_gram = second.detach().double().T @ second.detach().double()
        energy += (first_gram * second_gram).sum().item()
    # Rounding can leave a product of zero slightly below it.
    return AdaptersSize(layers, scale * math.sqrt(max(0.0, energy)))


def split_into_buckets(tensors: Mapping[str, Tensor], size: int = BUCKET) -> Iterator[Tensors]:
    """The tensors in their order, in parts of about ``size`` bytes."""
    bucket: Tensors = {}
    filled = 0
    for name, tensor in tensors.items():
        # Never an empty bucket: a tensor that is larger than a bucket is one of its own.
        if bucket and filled + tensor.nbytes > size:
            yield bucket
            bucket = {}
            filled = 0
        bucket[name] = tensor
        filled += tensor.nbytes
    if bucket:
        yield bucket


def compute_checksum(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over the names, shapes, types and bytes of all tensors, whatever their order.

    Parts of them are hashed at once: one core hashes about 1 GB/s, and the rollouts of the next
    step wait for it.
    """
    parts = split_into_buckets(dict(sorted(tensors.items())), HASHED_AT_ONCE)
    # Threads suffice: hashlib releases the interpreter's lock while it hashes.
    with ThreadPoolExecutor() as pool:
        return hashlib.sha256(b"".join(pool.map(_compute_digest, parts))).hexdigest()


def _compute_digest(tensors: Tensors) -> bytes:
    sha = hashlib.sha256()
    for name, value in tensors.items():
        tensor = value.detach().cpu().contiguous()
        # Names, shapes and types are part of it: equal bytes under another name are other weights.
        sha.update(f"{name} {list(tensor.shape)} {tensor.dtype};".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.digest()
