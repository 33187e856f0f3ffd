"""vLLM-Omni without a GPU: the platform, and linear layers whose weights can be replaced."""

from __future__ import annotations

import torch
from torch import nn
from vllm.model_executor.layers import linear, utils
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """What vLLM-Omni asks of a platform, on a CPU."""

    _omni_enum = OmniPlatformEnum.OOT
    dist_backend = "gloo"

    def __init__(self) -> None:
        super().__init__()
        _keep_linear_weights()

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        return "ebbflow_vllm_omni.attention.CpuAttentionBackend"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """There is one."""

    @classmethod
    def synchronize(cls) -> None:
        """Nothing runs beside this thread."""

    @classmethod
    def empty_cache(cls) -> None:
        """There is none."""

    @classmethod
    def reset_peak_memory_stats(cls, device: torch.device | None = None) -> None:
        """There are none."""

    @classmethod
    def max_memory_reserved(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def max_memory_allocated(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        return 0, 0


def _keep_linear_weights() -> None:
    """vLLM packs the weights of linear layers for the CPU and empties the originals, where updates
    would have to go.
    """

    def keep_weights(layer: nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    for module in (utils, linear):
        module.dispatch_cpu_unquantized_gemm = keep_weights
