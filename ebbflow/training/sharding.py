"""FSDP2: which modules of a model are sharded over the ranks, and whole tensors from shards and
back.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from ebbflow.models.base import Model, trained_networks
from ebbflow.recipe.model import FsdpConfig
from ebbflow.training.distributed import build_replica_mesh


def shard_model(
    model: Model, in_float32: bool, replicas: int, cpu_offload: bool, fsdp: FsdpConfig
) -> None:
    """Shard the trained networks of a model with FSDP2: each block by itself, then what is left.

    Args:
        in_float32: cast the weights to float32 first, as full-parameter training needs them.
        replicas: of the sharded model (HSDP).
        cpu_offload: keep parameters and gradients in main memory.
    """
    if fsdp.gather == "bfloat16":
        # Weights are gathered and computed with in bfloat16; gradients are still summed in float32.
        # Inputs are not cast: in bfloat16 a timestep would keep 8 significant bits.
        mp_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    else:
        mp_policy = MixedPrecisionPolicy()
    offload_policy = OffloadPolicy()
    if cpu_offload:
        offload_policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    arguments: dict[str, Any] = {
        "mp_policy": mp_policy,
        "mesh": build_replica_mesh(replicas),
        "reshard_after_forward": True,
        "offload_policy": offload_policy,
    }
    for block in model.list_blocks():
        # Cast block by block: all of a large model in float32 would not fit beside what it was
        # loaded as.
        fully_shard(block.float() if in_float32 else block, **arguments)
    if in_float32:
        model.transformer.float()
    networks = trained_networks(model.transformer).values()
    for network in networks:
        # Each network is a root that is called by itself. Without sharding it the root would keep
        # its gathered weights after a forward pass and would not see a copy swapped in.
        fully_shard(network, **arguments)
    if fsdp.prefetch:
        for network in networks:
            # A block cannot prefetch one of another network: each is a root of its own.
            inside = set(network.modules())
            sharded = cast("list[FSDPModule]", [b for b in model.list_blocks() if b in inside])
            for this, following in pairwise(sharded):
                this.set_modules_to_forward_prefetch([following])


def shard_like(full: Tensor, parameter: Tensor) -> Tensor:
    """Shard a whole tensor as a parameter is, and move it to its device; a parameter that is not
    sharded leaves it as it is.
    """
    if not isinstance(parameter, DTensor):
        return full
    return distribute_tensor(full, parameter.device_mesh, parameter.placements).to(parameter.device)


def gather_tensor(value: Tensor) -> Tensor:
    """Gather the shards of all processes into one tensor on the CPU; every process must call it."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu().contiguous()


def gather_tensors(values: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Gather tensors on the CPU, for the process that keeps them; the others only take part."""
    whole = {}
    for key, value in values.items():
        full = gather_tensor(value)  # a collective call, also for those that drop the result
        if keep:
            whole[key] = full
    return whole
