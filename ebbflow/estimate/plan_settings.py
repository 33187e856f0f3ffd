"""The keys that a plan comes to, to paste into the recipe and the deployment, and the memory of its
processes.
"""

from __future__ import annotations

import math
from typing import get_args

from ebbflow.estimate.gpus import GPU_TYPES
from ebbflow.estimate.plan import GPUS_PER_NODE, OnlineWork, Plan
from ebbflow.estimate.run import Estimate, Sharding, estimate_from_sizes
from ebbflow.recipe.online import ResourcesConfig, WorkersConfig

GIB = 2**30
USABLE = 0.9
"""Share of a GPU's memory: CUDA's context and fragmentation take the rest."""
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)


def describe_settings(
    estimate: Estimate, work: OnlineWork, plan: Plan, gpus: int, gpu: str
) -> list[str]:
    """Return the lines of YAML of a plan, and what its processes need of a GPU's memory."""
    nodes = math.ceil(gpus / GPUS_PER_NODE)
    processes = min(gpus, GPUS_PER_NODE)
    memory = GPU_TYPES[gpu].memory
    lines = ["  keys of the stage, to paste", "", f"    mode: {plan.mode}"]
    if plan.mode == "async":
        lines.append(f"    staleness: {work.steps_ahead('async')}")
    if not plan.colocated:
        lines += ["    placement: ray", "    resources:"]
        for role, count in zip(plan.split._fields, plan.split, strict=True):
            if count:
                lines.append(f"      {role}: {{count: {count}, gpus: 1}}")
        needs = {
            role: size
            for role, size in _list_split_memory(estimate, work, plan).items()
            if role != "rewards"
        }
        listed = ", ".join(f"{role} {size / GIB:.1f}" for role, size in needs.items())
        return [*lines, "", f"  GiB of each process, of {memory} of a GPU ({gpu}): {listed}"]
    by_sharding: dict[Sharding, int] = {
        sharding: _measure_colocated_memory(estimate, work, processes, nodes, sharding)
        for sharding in SHARDINGS
        # Within one node the two are the same.
        if not (sharding == "hybrid" and nodes == 1)
    }
    sharding = _choose_sharding(by_sharding, memory * GIB * USABLE)
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in by_sharding.items())
    return [
        *lines,
        "    placement: colocated",
        "",
        "  and of the deployment",
        "",
        f"    train_processes: {processes}",
        f"    train_nodes: {nodes}",
        f"    train_sharding: {sharding}",
        "",
        f"  GiB of each process, of {memory} of a GPU ({gpu}), by train_sharding: {listed}",
        *_describe_shared_tokens(estimate, work, processes, nodes, by_sharding, memory),
    ]


def _describe_shared_tokens(
    estimate: Estimate,
    work: OnlineWork,
    processes: int,
    nodes: int,
    by_sharding: dict[Sharding, int],
    memory: int,
) -> list[str]:
    """Return a line of how many processes have to share each sample where no process fits its GPU
    otherwise; none where one does, or where sharing does not help.
    """
    usable = memory * GIB * USABLE
    if min(by_sharding.values()) <= usable:
        return []
    for sharing in range(2, processes + 1):
        if processes % sharing == 0:
            size = _measure_colocated_memory(estimate, work, processes, nodes, "full", sharing)
            if size <= usable:
                return [
                    f"  None fits. With train_context_parallel: {sharing}, where the family shares"
                    f" tokens (docs/nodes.md), and full: {size / GIB:.1f}; the times above are"
                    " without it"
                ]
    return []


def _choose_sharding(needs: dict[Sharding, int], usable: float) -> Sharding:
    """Choose the sharding that sends least, of those with which a process fits its GPU; where none
    does, the one that needs least memory.
    """
    order: tuple[Sharding, ...] = ("replicated", "hybrid", "full")
    for sharding in order:
        if needs.get(sharding, math.inf) <= usable:
            return sharding
    return "full"


def _measure_colocated_memory(
    estimate: Estimate,
    work: OnlineWork,
    processes: int,
    nodes: int,
    sharding: Sharding,
    context_parallel: int = 1,
) -> int:
    made = _estimate_with_stage(
        estimate, work, processes, nodes, sharding, {"placement": "colocated"}, context_parallel
    )
    return made[f"{work.ctx.stage_label} training"]


def _list_split_memory(estimate: Estimate, work: OnlineWork, plan: Plan) -> dict[str, int]:
    counts = {
        role: WorkersConfig(count=max(1, count), gpus=1)
        for role, count in zip(plan.split._fields, plan.split, strict=True)
    }
    keys = {"placement": "ray", "resources": ResourcesConfig(**counts)}
    prefix = f"{work.ctx.stage_label} "
    made = _estimate_with_stage(estimate, work, 1, 1, "full", keys)
    return {
        name.removeprefix(prefix): size for name, size in made.items() if name.startswith(prefix)
    }


def _estimate_with_stage(
    estimate: Estimate,
    work: OnlineWork,
    processes: int,
    nodes: int,
    sharding: Sharding,
    keys: dict[str, object],
    context_parallel: int = 1,
) -> dict[str, int]:
    """Return the bytes that each process needs at most, with other keys of the stage."""
    stages = list(estimate.recipe.stages)
    stages[work.ctx.stage] = work.ctx.online_config.model_copy(update=keys)
    recipe = estimate.recipe.model_copy(update={"stages": stages})
    made = estimate_from_sizes(
        recipe, processes, estimate.sizes, estimate.sample, nodes, sharding, context_parallel
    )
    return {name: memory.peak_bytes for name, memory in made.memory.items()}
