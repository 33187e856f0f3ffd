"""The gradient of a pass, and the error of training that must not go on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ebbflow.training.policy import Policy


class TrainingError(Exception):
    """Training that must not go on: names the sample, the step and the row, and what to change."""


def compute_gradient_norm(policy: Policy, scale: float = 1.0) -> Tensor:
    """Compute the norm of gradients that are ``scale`` times too large."""
    gradients = [p.grad for p in policy.parameters.values() if p.grad is not None]
    if scale != 1:
        gradients = list(torch._foreach_div(gradients, scale))
    norm = torch.nn.utils.get_total_norm(gradients)
    # Under FSDP2 this is a DTensor of partial norms; ``full_tensor`` adds them up over the ranks.
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
