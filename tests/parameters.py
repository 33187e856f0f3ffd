"""The parameters of a policy, as tests watch and change them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ebbflow.training.policy import Policy


def values(policy: Policy) -> dict[str, Tensor]:
    """A copy of them."""
    return {name: value.detach().clone() for name, value in policy.parameters.items()}


def moved(policy: Policy, size: float = 0.02, seed: int = 0) -> dict[str, Tensor]:
    """Those of another policy nearby."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + size * torch.randn(value.shape, generator=generator)
        for name, value in values(policy).items()
    }


def move(policy: Policy, size: float = 0.02, seed: int = 0) -> None:
    """Pretend to train: change every one."""
    policy.assign_parameters(moved(policy, size, seed))


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def changed(policy: Policy, before: Mapping[str, Tensor]) -> set[str]:
    """Which of them."""
    return {
        name for name, value in policy.parameters.items() if not torch.equal(value, before[name])
    }


def count_parameters(module: nn.Module) -> int:
    """Those of a network, trained or not."""
    return sum(parameter.numel() for parameter in module.parameters())
