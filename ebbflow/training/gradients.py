"""The gradient of a pass, and the error of training that must not go on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ebbflow.training.distributed import sum_over_processes
from ebbflow.training.policy import Policy


class TrainingError(Exception):
    """Training that must not go on: names the sample, the step and the row, and what to change."""


def add_gradient(
    policy: Policy,
    loss: Tensor,
    total: int,
    loss_scale: float,
    *,
    is_measured: bool,
    is_last: bool,
) -> Tensor | None:
    """Add the gradient of a pass to that of the passes before it; after the last one it is averaged
    over the processes.

    Args:
        loss: of each row of the pass on this process, [m].
        total: rows of all passes of all processes, over which the loss is averaged.
        loss_scale: the factor that keeps gradients in float16 from underflow.
        is_measured: whether the norm of the gradient of these rows alone is needed, which have to
            be the first.

    Returns:
        The norm of the mean gradient of these rows: of this process where it has their whole
        gradient, which costs no message; of all processes otherwise. None where it is not needed.
    """
    reduces = is_last or (is_measured and not policy.has_whole_gradients)
    # Adapters' gradients are summed over processes in the last pass, not in every one.
    policy.set_gradient_reduction(reduces)
    # The mean over ALL rows, not the mean of the passes' means: passes and processes may have
    # different numbers of rows, and a row must count the same in each.
    (loss.sum() * (loss_scale * policy.gradient_factor / total)).backward()
    norm = None
    if is_measured and policy.has_whole_gradients:
        num_rows = policy.gradient_factor * len(loss)
        norm = compute_gradient_norm(policy, loss_scale) * total / num_rows
    if reduces:
        policy.average_gradients()
    if is_measured and not policy.has_whole_gradients:
        num_rows_of_all = sum_over_processes(loss.new_tensor(len(loss)))
        norm = compute_gradient_norm(policy, loss_scale) * total / num_rows_of_all
    return norm


def compute_gradient_norm(policy: Policy, scale: float = 1.0) -> Tensor:
    """Compute the norm of gradients that are ``scale`` times too large."""
    gradients = [p.grad for p in policy.parameters.values() if p.grad is not None]
    if scale != 1:
        gradients = list(torch._foreach_div(gradients, scale))
    norm = torch.nn.utils.get_total_norm(gradients)
    # Under FSDP2 this is a DTensor of partial norms; ``full_tensor`` adds them up over the ranks.
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
