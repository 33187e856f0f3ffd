"""The gradient of a pass and the rows it is a mean over, and the error of training that must not
go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ebbflow.training.distributed import Ranks, sum_over_processes
from ebbflow.training.policy import Policy


class TrainingError(Exception):
    """Training that must not go on: names the sample, the step and the row, and what to change."""


class RowCounts(NamedTuple):
    """The rows of an update on all processes, and those whose gradient is measured by itself: the
    first pass. Where a process has the whole gradient of its rows, that is its own first pass,
    which costs no message; otherwise it is the first pass of all processes.

    Example: two replicas with 4 and 2 rows in one pass each are ``RowCounts(6, 8, 3 / 8)`` on the
    first of them: gradients are twice the share of the total, and (1/4 + 1/2) / 2 is 3/8.

    Attributes:
        total: rows of all passes of all processes, over which the loss is averaged.
        measured: what the gradient of the first pass, times ``total``, has to be divided by to be
            the mean over its rows.
        inverse: the mean of one over the distinct rows of what is measured; 0 where that is all.
    """

    total: int
    measured: float
    inverse: float


def count_rows(
    policy: Policy, slices: Sequence[slice], num_repeats: int, device: torch.device
) -> RowCounts:
    """Count the rows of all processes, in one message.

    Args:
        slices: the rows of each pass of this process.
        num_repeats: as of ``PolicyUpdater.update_policy``.
    """
    num_first = slices[0].stop - slices[0].start
    values = [float(slices[-1].stop), float(num_first), 1 / num_first]
    if Ranks.current().world > 1:
        values = sum_over_processes(
            torch.tensor(values, dtype=torch.float64, device=device)
        ).tolist()
    total, measured, inverse = values
    num_parts = len(slices)
    if policy.has_whole_gradients:
        num_parts *= Ranks.current().world // num_repeats
        measured = policy.gradient_factor * num_first
        inverse /= Ranks.current().world
    else:
        # Processes that share the tokens of a row, or have the same rows, each count it.
        inverse = policy.context_parallel * num_repeats / measured
    return RowCounts(int(total), measured, inverse if num_parts > 1 else 0.0)


def add_gradient(
    policy: Policy,
    loss: Tensor,
    counts: RowCounts,
    loss_scale: float,
    *,
    is_first: bool,
    is_last: bool,
) -> Tensor | None:
    """Add the gradient of a pass to that of the passes before it; after the last one it is averaged
    over the processes.

    Args:
        loss: of each row of the pass on this process, [m].
        loss_scale: the factor that keeps gradients in float16 from underflow.

    Returns:
        The norm of the mean gradient of the rows that are measured (``RowCounts``); None for all
        passes but the first, and where one pass is all.
    """
    is_measured = is_first and counts.inverse > 0
    reduces = is_last or (is_measured and not policy.has_whole_gradients)
    # Adapters' gradients are summed over processes in the last pass, not in every one.
    policy.set_gradient_reduction(reduces)
    # The mean over ALL rows, not the mean of the passes' means: passes and processes may have
    # different numbers of rows, and a row must count the same in each.
    (loss.sum() * (loss_scale * policy.gradient_factor / counts.total)).backward()
    norm = None
    if is_measured and policy.has_whole_gradients:
        norm = compute_gradient_norm(policy, loss_scale)
    if reduces:
        policy.average_gradients()
    if is_measured and norm is None:
        norm = compute_gradient_norm(policy, loss_scale)
    return None if norm is None else norm * counts.total / counts.measured


def compute_gradient_norm(policy: Policy, scale: float = 1.0) -> Tensor:
    """Compute the norm of gradients that are ``scale`` times too large."""
    gradients = [p.grad for p in policy.parameters.values() if p.grad is not None]
    if scale != 1:
        gradients = list(torch._foreach_div(gradients, scale))
    norm = torch.nn.utils.get_total_norm(gradients)
    # Under FSDP2 this is a DTensor of partial norms; ``full_tensor`` adds them up over the ranks.
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
