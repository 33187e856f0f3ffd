"""The samples of a step that lie on the ranks of a group that generated them, and their way to the
ranks that train on them.

A step's tensors are as long on every rank as in one process, so that positions mean the same
everywhere, but a rank has only the rows that it generated or was sent. Memory that was never
written is never taken, so the rest costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ebbflow.flow.trajectory import Trajectory
from ebbflow.rollouts.generate import Rollouts, join_rollouts
from ebbflow.training.distributed import Ranks, gather_objects

SHARED = ("sigmas", "steps")
"""Fields of a trajectory that have no row for each sample."""


@dataclass(frozen=True)
class RankValue:
    """A value that lies on one rank, or on all that share its tokens; on the others there is no
    more than the place.

    Example: the images of a request of 16 samples that rank 2 generated are
    ``RankValue(2, 16, images)`` there and ``RankValue(2, 16, None)`` on all other ranks.

    Attributes:
        owner: number of the rank among those with rows of their own (``Policy.row_ranks``).
    """

    owner: int
    num_samples: int
    value: Any


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
        handles: the rollouts of each request of the step, as ``Rollouts``.
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
        self.rollouts = self._build_rollouts(join_rollouts(own) if own else None)

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

    def _build_rollouts(self, own: Rollouts | None) -> Rollouts:
        """Build the tensors of all samples, with the rows of this rank's and everyone's
        log-probs.
        """
        trajectory = own.trajectory if own else None
        gathered = gather_objects(
            {
                "latents": _describe_rows(own.latents) if own else None,
                "log_probs": None if trajectory is None else trajectory.log_probs,
                "shared": {name: getattr(trajectory, name) for name in SHARED}
                if trajectory
                else {},
                "recorded": {
                    name: _describe_rows(value)
                    for name, value in (trajectory.list_columns() if trajectory else {}).items()
                    if name not in (*SHARED, "log_probs")
                },
            }
        )[:: self.context_parallel]
        # A rank may have generated nothing: the first sample's owner knows the shapes.
        known = gathered[int(self.owners[0])]
        rollouts = Rollouts(self._allocate(*known["latents"]), None)
        if known["shared"]:
            fields = {
                name: self._allocate(*description)
                for name, description in known["recorded"].items()
            }
            log_probs = self._allocate(known["log_probs"].shape[1:], known["log_probs"].dtype)
            for rank, part in enumerate(gathered):
                if part["log_probs"] is not None:
                    log_probs[torch.from_numpy(self.owners == rank)] = part["log_probs"]
            rollouts = replace(
                rollouts, trajectory=Trajectory(**known["shared"], **fields, log_probs=log_probs)
            )
        if own:
            mine = torch.from_numpy(self.owners == self.ranks.rank)
            rollouts.latents[mine] = own.latents
            for name in known["recorded"]:
                getattr(rollouts.trajectory, name)[mine] = getattr(trajectory, name)
        return rollouts

    def _allocate(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty((len(self.owners), *shape), dtype=dtype)


def _describe_rows(value: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Return the shape and type of a row."""
    return value.shape[1:], value.dtype
