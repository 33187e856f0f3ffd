"""The gradient of a pass, on one process and over all of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ebbflow.training.policy import Policy


class TrainingError(Exception):
    """Training that must not go on: names the sample, the step and the row, and what to change."""


def compute_gradient_norm(policy: Policy, scale: float = 1.0) -> Tensor:
    """The norm of gradients that are ``scale`` times too large."""
    gradients = [p.grad for p in policy.parameters.values() if p.grad is not None]
    if scale != 1:
        gradients = list(torch._foreach_div(gradients, scale))
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def sum_over_processes(value: Tensor) -> Tensor:
    """Over those that train together, in place."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def get_world_size() -> int:
    """Processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1
