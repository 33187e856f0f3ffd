"""Which parts of a pipeline are on the device: the networks always, text encoders and VAE while
they are called, and what does not fit with them in main memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

RESIDENT_SHARE = 0.05
"""Of the free memory of a device: a part that takes less stays there after its first call. The VAE
of an image model is 335 MB in float32, and is called for every micro-batch.
"""
ACTIVATIONS_SHARE = 0.25
"""Memory that must also be free for the activations of parts, as a share of their bytes."""


@contextmanager
def parts_on_device(
    device: torch.device, parts: Sequence[nn.Module], networks: Sequence[nn.Module] = ()
) -> Iterator[None]:
    """Have the parts on the device inside the block; after it in main memory, but for small ones.

    Args:
        networks: wait in main memory during the block where the parts do not fit with them. Weights
            that are sharded stay.
    """
    tensors = [tensor for part in parts for tensor in _list_tensors(part)]
    absent = [tensor for tensor in tensors if tensor.device != device]
    needed = _count_bytes(absent)
    waiting: list[Tensor] = []
    if needed * (1 + ACTIVATIONS_SHARE) > count_free_bytes(device):
        waiting = [
            tensor
            for network in networks
            for tensor in _list_tensors(network)
            if tensor.device == device and not isinstance(tensor, DTensor)
        ]
    # Frozen weights are not copied back: what is in main memory stays there.
    in_main_memory = [tensor.data for tensor in absent]
    try:
        for tensor in waiting:
            tensor.data = tensor.data.to("cpu")
        for tensor in absent:
            tensor.data = tensor.data.to(device)
        yield
    finally:
        if waiting or needed > RESIDENT_SHARE * count_free_bytes(device):
            for tensor, data in zip(absent, in_main_memory, strict=True):
                tensor.data = data
        for tensor in waiting:
            tensor.data = tensor.data.to(device)


def count_free_bytes(device: torch.device) -> float:
    """Count the bytes that tensors can still take on a device; without a limit on the CPU."""
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    # What torch has reserved and does not use is free to it as well.
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(free + reserved)


def _list_tensors(module: nn.Module) -> list[Tensor]:
    return list(itertools.chain(module.parameters(), module.buffers()))


def _count_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
