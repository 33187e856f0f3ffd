"""Networks in bfloat16 under float32 adapters, without autocast: the operations of diffusers' own
pipelines, and three kernels in each adapted layer.

Autocast would compute norms in float32 and cast the adapters in every layer: 60 % more kernels at
the size of SD3.5 medium (benchmarks/results/cuda_budget.md). Here the adapters are cast once for a
forward pass, all of them in one operation, and their product is added to the layer's output by the
matrix product itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ebbflow.models.base import Model
from ebbflow.models.fused_kernels import fuse_kernels

ADAPTER = "default"


class CastTogether(torch.autograd.Function):
    """Casts float32 tensors to bfloat16 in one operation, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        """Cast float32 tensors to bfloat16."""
        ctx.set_materialize_grads(False)
        casts = [torch.empty_like(value, dtype=torch.bfloat16) for value in values]
        torch._foreach_copy_(casts, list(values))
        return tuple(casts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Cast gradients to float32; one that is missing stays missing."""
        present = [gradient for gradient in gradients if gradient is not None]
        wide = [torch.empty_like(gradient, dtype=torch.float32) for gradient in present]
        torch._foreach_copy_(wide, present)
        remaining = iter(wide)
        return tuple(None if gradient is None else next(remaining) for gradient in gradients)


class BFloat16LoraLinear(LoraLinear):  # type: ignore[misc]
    """A linear layer in bfloat16 with float32 adapters: base(x) + scaling B A x.

    Attributes:
        casts: A [rank, in] and B [out, rank] in bfloat16 during a forward pass of the network; None
            otherwise, as in a pass that gradient checkpointing repeats, which casts them itself.
    """

    casts: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, *arguments: Any, **keys: Any) -> Tensor:
        result: Tensor = self.base_layer(x, *arguments, **keys)
        if self.disable_adapters or self.merged:
            return result
        first, second = self.casts or (self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight)
        dtype = result.dtype
        hidden = nn.functional.linear(x.to(dtype), first.to(dtype))  # [..., rank]
        # One kernel adds the product to the output. Its sum is in float32 and rounded once.
        added = torch.addmm(
            result.flatten(0, -2),
            hidden.flatten(0, -2),
            second.to(dtype).t(),
            alpha=self.scaling[ADAPTER],
        )
        return added.view(result.shape)


def compute_in_bfloat16(model: Model) -> None:
    """Have a model whose weights are in bfloat16, with adapters, predict without autocast."""
    layers = []
    for module in model.transformer.modules():
        # Their classes alone change: names, parameters and what peft stores of them stay.
        if type(module) is LoraLinear:
            module.__class__ = BFloat16LoraLinear
            layers.append(module)
    fuse_kernels(model.transformer)
    adapted: Any = model
    adapted.bfloat16_pass = partial(cast_adapters, layers)


@contextmanager
def cast_adapters(layers: Sequence[BFloat16LoraLinear]) -> Iterator[None]:
    """Cast the adapters of all layers at once, for a forward pass inside the block."""
    weights: list[Tensor] = []
    for layer in layers:
        weights += [layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight]
    # FSDP2 gathers the weights of a block when it comes to it; its layers cast them then.
    if not weights or isinstance(weights[0], DTensor):
        yield
        return
    casts = CastTogether.apply(*weights)  # type: ignore[no-untyped-call]
    try:
        for number, layer in enumerate(layers):
            layer.casts = (casts[2 * number], casts[2 * number + 1])
        yield
    finally:
        for layer in layers:
            layer.casts = None
