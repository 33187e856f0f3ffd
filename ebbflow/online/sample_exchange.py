"""The samples of a step that lie on the ranks of a group that generated them, and their way to the
ranks that train on them.

A step's tensors are as long on every rank as in one process, so that positions mean the same
everywhere, but a rank has only the rows that it generated or was sent. Memory that was never
written is never taken, so the rest costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ebbflow.flow.windows import Trajectory
from ebbflow.rollouts.generate import Rollouts, join_rollouts
from ebbflow.training.distributed import Ranks

SHARED = ("sigmas", "steps")
"""Fields of a trajectory that have no row for each sample."""


RowFormat = tuple[torch.Size, torch.dtype]
"""Shape and type of a tensor's row."""


@dataclass(frozen=True)
class RolloutsHeader:
    """What the ranks without the rollouts of a request know of them.

    Attributes:
        latents: of a sample.
        log_probs: of all trained steps, [n, W]; None without a trajectory.
        shared: the fields of the trajectory that have no row for each sample.
        recorded: the format of all others but the log-probs.
    """

    latents: RowFormat
    log_probs: Tensor | None
    shared: dict[str, Any]
    recorded: dict[str, RowFormat]

    @staticmethod
    def from_rollouts(rollouts: Rollouts) -> RolloutsHeader:
        trajectory = rollouts.trajectory
        if trajectory is None:
            return RolloutsHeader(_describe_row(rollouts.latents), None, {}, {})
        return RolloutsHeader(
            _describe_row(rollouts.latents),
            trajectory.log_probs,
            {name: getattr(trajectory, name) for name in SHARED},
            {
                name: _describe_row(value)
                for name, value in trajectory.list_columns().items()
                if name not in (*SHARED, "log_probs")
            },
        )


def _describe_row(value: Tensor) -> RowFormat:
    return value.shape[1:], value.dtype


@dataclass(frozen=True)
class RankValue:
    """A value that lies on one rank, or on all that share its tokens; on the others there is no
    more than the place.

    Example: the images of a request of 16 samples that rank 2 generated are
    ``RankValue(2, 16, images)`` there and ``RankValue(2, 16, None)`` on all other ranks.

    Attributes:
        owner: number of the rank among those with rows of their own (``Policy.row_ranks``).
        header: what every rank knows of the value, where it is the rollouts of a request.
    """

    owner: int
    num_samples: int
    value: Any
    header: RolloutsHeader | None = None


class SampleExchange:
    """The N samples of a step on one rank of the group.

    Example: of 4 samples, ranks 0 and 1 generated 2 each, and rank 1 trains on sample 1, too::

        exchange.owners  # [0, 0, 1, 1]
        exchange.bring([np.array([0]), np.array([1, 2, 3])])  # sends sample 1 from rank 0 to rank 1

    Ranks that share tokens hold the same samples and count as one here.

    Attributes:
        owners: the rank that generated each sample, integer [N].
        rollouts: rows of samples that are not here have no defined content, but for log-probs,
            which every rank has.
    """

    def __init__(self, handles: Sequence[RankValue], context_parallel: int = 1) -> None:
        """Args:
        handles: the rollouts of each request of the step, as ``Rollouts``, with their headers.
        context_parallel: as of ``Policy``.
        """
        self.context_parallel = context_parallel
        self.ranks = Ranks.current().row_ranks(context_parallel)
        self.owners = np.repeat(
            [handle.owner for handle in handles], [handle.num_samples for handle in handles]
        )
        # Which samples each rank has; every rank keeps the books of all, so none has to ask.
        self.held = self.owners == np.arange(self.ranks.world)[:, None]  # [world, N]
        own = [handle.value for handle in handles if handle.owner == self.ranks.rank]
        headers = [handle.header for handle in handles if handle.header is not None]
        self.rollouts = self._build_rollouts(headers, join_rollouts(own) if own else None)

    def bring(self, wanted: Sequence[np.ndarray]) -> None:
        """Send every rank the samples that it wants and has not; all ranks call it alike.

        Args:
            wanted: positions of samples, for each rank.
        """
        pending = []
        for receiver, samples in enumerate(wanted):
            missing = np.unique(samples[~self.held[receiver, samples]])
            for sender in np.unique(self.owners[missing]).tolist():
                rows = torch.from_numpy(missing[self.owners[missing] == sender])
                pending += self._start_transfers(sender, receiver, rows)
            self.held[receiver, missing] = True
        for work, tensor, rows, arrived in pending:
            work.wait()
            if tensor is not None:
                tensor[rows] = arrived

    def _start_transfers(
        self, sender: int, receiver: int, rows: Tensor
    ) -> list[tuple[dist.Work, Tensor | None, Tensor, Tensor]]:
        """Start to send or receive some rows of every tensor; nothing where this rank does neither.

        Returns:
            For each transfer what to wait for, and where to write what has arrived; None for what
            is sent.
        """
        pending: list[tuple[dist.Work, Tensor | None, Tensor, Tensor]] = []
        # Of the ranks that share tokens each sends to the one in its place.
        place = Ranks.current().rank % self.context_parallel
        # Tensors have the same order on both sides, so a number marks which one a message is of.
        for tag, tensor in enumerate(self._list_tensors()):
            if self.ranks.rank == sender:
                sent = tensor[rows].contiguous()
                work = dist.isend(sent, receiver * self.context_parallel + place, tag=tag)
                assert work is not None
                pending.append((work, None, rows, sent))
            elif self.ranks.rank == receiver:
                arrived = torch.empty((len(rows), *tensor.shape[1:]), dtype=tensor.dtype)
                work = dist.irecv(arrived, sender * self.context_parallel + place, tag=tag)
                assert work is not None
                pending.append((work, tensor, rows, arrived))
        return pending

    def _list_tensors(self) -> list[Tensor]:
        """List the tensors that have a row for each sample, but for log-probs."""
        trajectory = self.rollouts.trajectory
        recorded = {} if trajectory is None else trajectory.list_columns()
        names = sorted(set(recorded) - {*SHARED, "log_probs"})
        return [self.rollouts.latents, *(recorded[name] for name in names)]

    def _build_rollouts(self, headers: Sequence[RolloutsHeader], own: Rollouts | None) -> Rollouts:
        """Build the tensors of all samples, with the rows of this rank's and everyone's
        log-probs.
        """
        first = headers[0]
        trajectory = None
        if first.shared:
            fields = {name: self._allocate(row) for name, row in first.recorded.items()}
            log_probs = torch.cat([h.log_probs for h in headers if h.log_probs is not None])
            trajectory = Trajectory(**first.shared, **fields, log_probs=log_probs)
        rollouts = Rollouts(self._allocate(first.latents), trajectory)
        if own:
            mine = torch.from_numpy(self.owners == self.ranks.rank)
            rollouts.latents[mine] = own.latents
            for name in first.recorded:
                getattr(trajectory, name)[mine] = getattr(own.trajectory, name)
        return rollouts

    def _allocate(self, row: RowFormat) -> Tensor:
        shape, dtype = row
        return torch.empty((len(self.owners), *shape), dtype=dtype)
