"""Ebbflow's side of the vLLM-Omni engine, in the engine's own environment:
`ebbflow.rollouts.vllm_omni` talks to it.
"""

from __future__ import annotations

import importlib

import torch


def cpu_platform() -> str | None:
    """The platform of machines without a GPU, of which vLLM-Omni ships none; nothing elsewhere."""
    return None if torch.cuda.is_available() else "ebbflow_vllm_omni.cpu.CpuOmniPlatform"


def _declare_torchvision_operators() -> None:
    """Declare the two operators that torchvision's Python code wants at import.

    Its published wheels are built against CUDA, and beside a torch without it their compiled
    operators do not load. Nothing here calls them.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
        importlib.import_module("torchvision")


_KEPT: list[torch.library.Library] = []
"""A library's definitions go with it."""
_declare_torchvision_operators()
