"""Reads the weights of a policy's networks from their files, after adapters are on them and FSDP2
has sharded them: each process reads its shards alone, and casts them before they go to its device.

A policy is built around networks without weights (``ebbflow.models.load_model``) in three steps.
``add_placeholders`` gives every parameter its precision and no memory, so that peft and FSDP2 find
what they look at. ``move_to_meta`` follows before FSDP2 shards, which copies parameters that have
values. ``read_weights`` reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ebbflow.models.base import DTYPES, Model, trained_networks
from ebbflow.models.weight_files import PendingWeights
from ebbflow.training.sharding import shard_like

BASE_LAYER = ".base_layer"
"""Where peft keeps a layer that it adapts; it is not part of the names in the files."""


def find_pending_weights(model: Model) -> PendingWeights | None:
    """Return the weights that a model still has to read; None for one that is loaded."""
    pending: PendingWeights | None = getattr(model, "pending_weights", None)
    return pending


def add_placeholders(model: Model, in_float32: bool) -> None:
    """Give each parameter the precision that it will have, and a value that takes no memory.

    Args:
        in_float32: all of them, as full-parameter training keeps them; otherwise weights are in the
            model's precision, but for the layers that diffusers names as too delicate for it.
    """
    pending = find_pending_weights(model)
    assert pending is not None, "the model has no weights yet"
    for prefix, network in trained_networks(model.transformer).items():
        delicate = set(network._keep_in_fp32_modules or ())
        published = pending.files[prefix].dtype
        for name, parameter in list(network.named_parameters()):
            dtype = torch.float32 if in_float32 else DTYPES[model.precision]
            if not in_float32 and delicate.intersection(name.split(".")):
                # As diffusers loads them: float32 in place of a published 16 bits.
                dtype = torch.float32 if published.itemsize < 4 else published
            module_name, _, parameter_name = name.rpartition(".")
            # One number for all elements. On the CPU and not on meta, as peft puts adapters where
            # the layer is, and these have values.
            placeholder = torch.zeros((), dtype=dtype).expand(parameter.shape)
            setattr(
                network.get_submodule(module_name),
                parameter_name,
                nn.Parameter(placeholder, requires_grad=False),
            )


def move_to_meta(model: Model) -> dict[str, Tensor]:
    """Move the parameters to the meta device; return those of adapters, by name."""
    adapters = {}
    for name, parameter in list(model.transformer.named_parameters()):
        if is_adapter(name):
            adapters[name] = parameter.detach()
        module_name, _, parameter_name = name.rpartition(".")
        meta = torch.empty_like(parameter, device="meta")
        setattr(
            model.transformer.get_submodule(module_name),
            parameter_name,
            nn.Parameter(meta, requires_grad=parameter.requires_grad),
        )
    return adapters


def is_adapter(name: str) -> bool:
    """Return whether a parameter is one of peft's."""
    return "lora_" in name


@torch.no_grad()
def read_weights(model: Model, device: torch.device, adapters: Mapping[str, Tensor]) -> None:
    """Read all weights, those of shards alone where the networks are sharded.

    Args:
        device: where parameters are between steps: that of the network, or of a sharded model with
            ``model.cpu_offload`` the CPU.
        adapters: those of ``move_to_meta``; none where the networks are not sharded.
    """
    pending = find_pending_weights(model)
    assert pending is not None, "the model has no weights yet"

    def allocate(value: Tensor) -> Tensor:
        return torch.empty_like(value, device=device) if value.is_meta else value

    for network in trained_networks(model.transformer).values():
        # As ``Module.to_empty``, which would also clear the buffers that have values. FSDP2 follows
        # (``FSDPModule._apply``).
        network._apply(allocate)
    for name, parameter in model.transformer.named_parameters():
        if name in adapters:
            parameter.copy_(shard_like(adapters[name], parameter))
        elif is_adapter(name):
            parameter.data = parameter.data.to(device)
        elif isinstance(parameter, DTensor):
            local = parameter.to_local()
            rows = find_local_rows(parameter)
            if local.numel():
                local.copy_(pending.read_tensor(name.replace(BASE_LAYER, ""), rows).to(local.dtype))
        else:
            value = pending.read_tensor(name.replace(BASE_LAYER, ""))
            # Copied even where nothing is cast: the memory of a file is not aligned.
            parameter.data = value.to(parameter.dtype).to(device, copy=True)
    for layer in model.transformer.modules():
        for buffer_name, buffer in list(layer._buffers.items()):
            if buffer is not None and not isinstance(buffer, DTensor):
                layer._buffers[buffer_name] = buffer.to(device)
    del model.pending_weights  # type: ignore[attr-defined]


def read_magnitudes(model: Model, adapter: str) -> None:
    """Set the magnitudes of DoRA to the norms of the weights in the files, in the precision in
    which peft divides by the norm: their ratio is 1 at the base model.
    """
    pending = find_pending_weights(model)
    assert pending is not None, "the model has no weights yet"
    for name, layer in model.transformer.named_modules():
        if isinstance(layer, LoraLayer):
            weight: Any = layer.get_base_layer().weight
            values = pending.read_tensor(f"{name}.weight").to(weight.dtype)
            layer.lora_magnitude_vector[adapter].weight.data = values.float().norm(dim=1)


def find_local_rows(parameter: DTensor) -> slice:
    """Return the rows of a parameter that this process has, as FSDP2 shards dimension 0."""
    num_rows = parameter.shape[0]
    rows = slice(0, num_rows)
    for dimension, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0, "FSDP2 shards rows"
            size = math.ceil(num_rows / parameter.device_mesh.size(dimension))
            start = min(num_rows, size * parameter.device_mesh.get_local_rank(dimension))
            rows = slice(start, min(num_rows, start + size))
    return rows
