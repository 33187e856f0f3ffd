"""Batches that the ranks of a machine compute in rounds, each rank one of a round, and rank 0 puts
together in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ebbflow.training.distributed import Ranks
from ebbflow.training.object_messages import broadcast_object

T = TypeVar("T")
R = TypeVar("R")


def deal_in_rounds(batches: Sequence[T]) -> list[T | None]:
    """Return the batch of this rank in each round; None where the last round has none for it.

    Example:
        Five batches on two ranks are three rounds: rank 0 gets batches 0, 2 and 4, rank 1 gets
        1 and 3, and None in the last. One process gets all five.
    """
    ranks = Ranks.current()
    positions = range(ranks.rank, len(batches) + ranks.rank, ranks.world)
    return [batches[index] if index < len(batches) else None for index in positions]


def collect_rounds(parts: Iterable[T | None]) -> Iterator[T]:
    """Yield on rank 0 the parts of all ranks, in the order of their batches; the other ranks send
    theirs, and yield nothing. All of them iterate to the end.

    A round travels as soon as rank 0 asks for it, so that memory is that of one part for each rank.

    Args:
        parts: of this rank, one for each batch of ``deal_in_rounds``.
    """
    for part in parts:
        for gathered in _gather_to_first(part):
            if gathered is not None:
                yield gathered


def call_on_first(work: Callable[[], R]) -> R:
    """Call a function on rank 0 alone, and return its result on every rank; all of them ask."""
    result = work() if Ranks.current().rank == 0 else None
    return cast(R, broadcast_object(result, 0))


def _gather_to_first(value: Any) -> list[Any]:
    """Return on rank 0 what each rank has, in their order, and nothing on the others."""
    if not dist.is_initialized():
        return [value]
    ranks = Ranks.current()
    values: list[Any] | None = [None] * ranks.world if ranks.rank == 0 else None
    dist.gather_object(value, values, 0)
    return values or []
