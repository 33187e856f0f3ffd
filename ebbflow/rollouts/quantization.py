"""Rollouts whose products are in 8 bits (``rollout_quantization``), by torchao.

Inside a block the linear layers of the network's blocks have other weights, and after it the same
objects as before: what trains, validates and is saved never sees a rounded number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ebbflow.models.base import Model, ModelError, device_of
from ebbflow.recipe.rollout_cache import Quantization

MULTIPLE = 16
"""Both sides of a matrix that the tensor cores multiply in 8 bits are multiples of it."""
CAPABILITY = (8, 9)
"""The first GPUs that multiply in 8 bits of floating point: L4, L40 and RTX 4090; then H100."""


@contextmanager
def quantize_linears(model: Model, quantization: Quantization) -> Iterator[None]:
    """Have the linear layers of the network's blocks compute in 8 bits inside the block.

    A GPU rounds weights row by row and activations token by token to e4m3, and multiplies in 8
    bits. Elsewhere only the weights are rounded, and the products are those of 16 bits.

    Raises:
        ModelError: the GPU cannot, the weights are sharded, or no layer is large enough.
    """
    linears = _find_linears(model)
    weights = {name: linear.weight for name, linear in linears.items()}
    biases = {name: linear.bias for name, linear in linears.items()}
    _require_quantizable(weights, device_of(model), quantization)
    quantize = _build_quantizer(device_of(model))
    casts = []
    try:
        # One after the other: there is never more than one copy in 16 bits.
        for linear in linears.values():
            # Parameters of their own: the trained ones are put back as they are. Trained weights
            # are float32, and torchao scales rows of bfloat16.
            rounded = linear.weight.detach().to(torch.bfloat16)
            linear.weight = nn.Parameter(rounded, requires_grad=False)
            # A product in 8 bits (``torch._scaled_mm``) adds no bias in float32.
            if linear.bias is not None:
                bias = linear.bias.detach().to(torch.bfloat16)
                linear.bias = nn.Parameter(bias, requires_grad=False)
            quantize(linear)
            casts.append(linear.register_forward_pre_hook(_cast_input))
        yield
    finally:
        for name, linear in linears.items():
            linear.weight = weights[name]
            linear.bias = biases[name]
            # torchao's way to print the layer
            vars(linear).pop("extra_repr", None)
        for cast in casts:
            cast.remove()


def _find_linears(model: Model) -> dict[str, nn.Linear]:
    """Find the linear layers of the blocks, without adapters, whose few products stay exact."""
    return {
        f"{number}.{name}": module
        for number, block in enumerate(model.list_blocks())
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
        and ".lora_" not in f".{name}"
        and not module.in_features % MULTIPLE
        and not module.out_features % MULTIPLE
    }


def _require_quantizable(
    weights: Mapping[str, Tensor], device: torch.device, quantization: Quantization
) -> None:
    key = f"rollout_quantization = {quantization!r}"
    if not weights:
        raise ModelError(
            f"{key} finds no linear layer whose sides are multiples of {MULTIPLE} in the blocks of"
            " the network; leave it out"
        )
    if any(isinstance(weight, DTensor) for weight in weights.values()):
        raise ModelError(
            f"{key} rounds whole weights, and these are sharded; set train_sharding: replicated in"
            " the deployment, or placement: ray, or leave it out"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        raise ModelError(
            f"{key}: {torch.cuda.get_device_name(device)} does not multiply in 8 bits of floating"
            f" point, which GPUs of compute capability {'.'.join(map(str, CAPABILITY))} and above"
            " do; leave it out"
        )


def _build_quantizer(device: torch.device) -> Callable[[nn.Linear], None]:
    """Return what replaces the weight of a layer."""
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Float8WeightOnlyConfig,
        PerRow,
        quantize_,
    )

    # torchao would change settings of the compiler for the whole process.
    if device.type == "cuda":
        config = Float8DynamicActivationFloat8WeightConfig(
            granularity=PerRow(), set_inductor_config=False
        )
    else:
        config = Float8WeightOnlyConfig(set_inductor_config=False)
    # torchao replaces layers inside of a module.
    return lambda linear: quantize_(nn.ModuleList([linear]), config)


def _cast_input(linear: nn.Module, arguments: Any) -> tuple[Tensor]:
    # What autocast does before a product of plain weights.
    return (arguments[0].to(torch.bfloat16),)
