"""Python objects as messages between the ranks of a group.

torch packs the objects as in its own ``all_gather_object``: the ranks of a group trust each other,
and nothing that comes from a file or from outside of the group is read here.

A rank that sends does not tell the others first how long its object is: the first part of a message
has a fixed length and says it, and only an object that does not fit there needs a second part.
torch's ``all_gather_object`` sends the lengths before the objects, each time. The ranks of an
online stage exchange small objects in every step, and wait for each other in every message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _object_to_tensor, _tensor_to_object

FIRST_PART = 16 * 2**10
"""Bytes of the first part of a message."""
LENGTH = 8
"""Of these, those that say how many bytes the object has, as an int64."""


@dataclass
class SentObject:
    """An object on its way to another rank; its tensors stay until it has arrived."""

    parts: list[tuple[dist.Work, Tensor]]

    def wait_until_received(self) -> None:
        for work, _ in self.parts:
            work.wait()
        self.parts = []


def broadcast_object(value: Any, sender: int) -> Any:
    """Return the object that one rank has; all of them ask."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, sender)
    return values[0]


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return what each rank, of a group or of all, has, in their order; all of them ask."""
    if not dist.is_initialized():
        return [value]
    first, rest = _pack_object(value)
    firsts = _gather_tensors(first, group)
    # Every rank reads the same lengths, so all of them enter the second message or none does.
    longest = max(_count_missing_bytes(part) for part in firsts)
    rests = [rest[:0]] * len(firsts)
    if longest:
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(rest)] = rest
        rests = _gather_tensors(padded, group)
    return [_unpack_object(*parts) for parts in zip(firsts, rests, strict=True)]


def send_object(value: Any, receiver: int, tag: int) -> SentObject:
    """Send an object to a rank, without waiting until that rank receives it (``receive_object``).

    Args:
        tag: a number that no other message between the two has at that time.
    """
    parts = []
    for part in _pack_object(value):
        if len(part):
            sent = part.to(_choose_device())
            work = dist.isend(sent, receiver, tag=tag)
            assert work is not None  # None is for ranks outside of a group
            parts.append((work, sent))
    return SentObject(parts)


def receive_object(sender: int, tag: int) -> Any:
    """Return the object that a rank sends (``send_object``)."""
    first = _receive_tensor(FIRST_PART, sender, tag)
    missing = _count_missing_bytes(first)
    rest = _receive_tensor(missing, sender, tag) if missing else first[:0]
    return _unpack_object(first, rest)


def _pack_object(value: Any) -> tuple[Tensor, Tensor]:
    """Pack an object into a part of ``FIRST_PART`` bytes and the rest, uint8; most rests are
    empty.
    """
    # The group is asked for by torch's debugging alone, which hashes what NCCL sends.
    content, length = _object_to_tensor(value, torch.device("cpu"), None)
    packed = torch.zeros(max(FIRST_PART, LENGTH + len(content)), dtype=torch.uint8)
    packed[:LENGTH] = length.view(torch.uint8)
    packed[LENGTH : LENGTH + len(content)] = content
    return packed[:FIRST_PART], packed[FIRST_PART:]


def _unpack_object(first: Tensor, rest: Tensor) -> Any:
    length = int(first[:LENGTH].view(torch.int64))
    # What pads the last part is behind the object, and is not read.
    return _tensor_to_object(torch.cat([first[LENGTH:], rest]), length, None)


def _count_missing_bytes(first: Tensor) -> int:
    """Count the bytes of a packed object that its first part has no room for."""
    return max(0, LENGTH + int(first[:LENGTH].view(torch.int64)) - FIRST_PART)


def _gather_tensors(value: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Gather a tensor of the same size from every rank."""
    sent = value.to(_choose_device(group))
    gathered = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, sent, group)
    return [part.cpu() for part in gathered]


def _receive_tensor(size: int, sender: int, tag: int) -> Tensor:
    received = torch.empty(size, dtype=torch.uint8, device=_choose_device())
    dist.recv(received, sender, tag=tag)
    return received.cpu()


def _choose_device(group: dist.ProcessGroup | None = None) -> str:
    """Choose the device of messages: main memory, where the objects are, if the group sends from
    there; NCCL alone sends from GPUs only.
    """
    return "cpu" if "gloo" in dist.get_backend_config(group) else "cuda"
