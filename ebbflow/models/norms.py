"""Norms of networks in one kernel each."""

from __future__ import annotations

from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn


class FusedRMSNorm(RMSNorm):  # type: ignore[misc]
    """diffusers' RMSNorm in one kernel, which rounds once and not after each operation."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.weight is None or self.bias is not None or hidden_states.dtype != self.weight.dtype:
            output: Tensor = super().forward(hidden_states)
            return output
        return nn.functional.rms_norm(hidden_states, self.dim, self.weight, self.eps)


def fuse_norms(network: nn.Module) -> None:
    """Have the RMS norms of a network compute in one kernel where they compute in the precision of
    their weights.
    """
    for module in network.modules():
        if type(module) is RMSNorm:
            module.__class__ = FusedRMSNorm
