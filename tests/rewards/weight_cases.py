"""Random weights of tiny networks, by the names and shapes of published ones."""

from __future__ import annotations

import torch


def linear_shapes(name: str, width: int, out: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, width), f"{name}.bias": (out,)}


def norm_shapes(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def draw_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    fill_weights(weights)
    return weights


@torch.no_grad()
def fill_weights(weights: dict[str, torch.Tensor]) -> None:
    """Matrices so that features keep their size from layer to layer, and everything else near 0 or,
    for scales of norms, 1.
    """
    stream = torch.Generator().manual_seed(3)
    for name, weight in sorted(weights.items()):
        noise = torch.randn(weight.shape, generator=stream)
        if weight.ndim > 1 and "embed" not in name:
            weight.copy_(noise * weight[0].numel() ** -0.5)
        elif weight.ndim > 1 or "embed" in name:
            weight.copy_(noise * 0.5)
        else:
            weight.copy_(0.1 * noise + name.endswith((".weight", "logit_scale")))
