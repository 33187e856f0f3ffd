"""The attention of ``ebbflow_vllm_omni.cpu``, a module of its own because it can only be imported
once the platform is there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuAttention(SDPAImpl):
    """Torch's own attention. The base class asks the platform for its kind and knows none outside
    its tree.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None
    ) -> Tensor:
        return self.forward_cuda(query, key, value, attn_metadata)


class CpuAttentionBackend(SDPABackend):
    """Names ``CpuAttention``."""

    @staticmethod
    def get_impl_cls() -> type[SDPAImpl]:
        return CpuAttention
