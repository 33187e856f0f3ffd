"""Whether the machines of a deployment hold what an estimate needs, and what to change where they
do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.deployment import GPU_GIB, DeploymentConfig, PodConfig, RayWorkersConfig

if TYPE_CHECKING:
    from ebbflow.estimate.run import Estimate
    from ebbflow.recipe import Recipe
    from ebbflow.recipe.online import WorkersConfig

GIB = 2**30
USABLE = 0.9
"""Share of a GPU's memory: CUDA's context and fragmentation take the rest."""
UNITS = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
MAX_PROCESSES = 64
"""Training processes that are proposed for a stage."""
MAIN_MEMORY = "main memory"


@dataclass(frozen=True)
class Machine:
    """What one process gets.

    Attributes:
        key: of the deployment.
        name: for messages.
        bytes: of its GPU, or of main memory without one; None where a GPU's is not known.
        gpu: whether these are a GPU's.
        main_memory: bytes of main memory that a process with a GPU needs.
        sharing: processes that share the pod.
    """

    key: str
    name: str
    bytes: float | None
    gpu: bool
    main_memory: float
    sharing: int = 1

    @property
    def usable_bytes(self) -> float:
        """Bytes that a process may need."""
        return math.inf if self.bytes is None else self.bytes * (USABLE if self.gpu else 1)


def compare_needs(made: Estimate, deployment: DeploymentConfig) -> tuple[list[str], list[str]]:
    """(a line for each kind of process with its need and its machine, a line with the fix for each
    that does not fit).
    """
    lines = []
    misfits = []
    for name in made.memory:
        machine = find_machine(made, name, deployment)
        need = _needed_bytes(made, name, machine)
        fits = need <= machine.usable_bytes
        verdict = "fits" if fits else "DOES NOT FIT"
        lines.append(
            f"  {name}: {need / GIB:.1f} GiB of {machine.name}, {machine.key}:"
            f" {verdict if machine.bytes else 'unknown'}"
        )
        if not fits:
            task = (
                f"{name} needs {need / GIB:.1f} GiB, and {machine.key} gives it"
                f" {machine.usable_bytes / GIB:.1f} GiB of {machine.name}"
            )
            misfits.append(f"{task}: {', or '.join(_suggest_fixes(made, name, machine, need))}")
        if (kept := _offloaded_bytes(made, name, machine)) > machine.main_memory:
            more = math.ceil((kept - machine.main_memory) * machine.sharing / GIB)
            misfits.append(
                f"{name} keeps {kept / GIB:.1f} GiB in {MAIN_MEMORY}, and {machine.key} gives it"
                f" {machine.main_memory / GIB:.1f} GiB: raise {machine.key}.mem by {more}Gi, or"
                " leave model.cpu_offload out"
            )
    return lines, misfits


def _needed_bytes(made: Estimate, name: str, machine: Machine) -> int:
    """Bytes of a process: of its GPU, or without one, of all that is in main memory."""
    memory = made.memory[name]
    return (
        memory.peak_bytes
        if machine.gpu
        else memory.peak_bytes + memory.offloaded + made.main_memory
    )


def _offloaded_bytes(made: Estimate, name: str, machine: Machine) -> int:
    """Bytes in main memory of a process with a GPU that offloads: those, and the parts that wait
    there; else 0.
    """
    offloaded = made.memory[name].offloaded if machine.gpu else 0
    return offloaded + made.main_memory if offloaded else 0


def find_machine(made: Estimate, name: str, deployment: DeploymentConfig) -> Machine:
    """The machine of a process that an estimate names; of several groups of Ray workers the largest
    that suits.
    """
    stage, role = _parse_process_name(made.recipe, name)
    if stage is not None and made.recipe.stages[stage].kind == "offline" and role == "training":
        return _build_machine("training_group", deployment.training_group, made.processes)
    if (
        stage is None
        or (config := made.recipe.stages[stage]).kind != "online"
        or config.placement != "ray"
    ):
        return _build_machine("accelerated", deployment.accelerated, 1)
    workers: WorkersConfig = getattr(config.resources, {"rewards": "reward"}.get(role, role))
    groups = [
        _build_ray_machine(index, group, workers, deployment)
        for index, group in enumerate(deployment.ray_cluster.workers)
    ]
    return max(
        groups, key=lambda machine: (machine.gpu == bool(workers.gpus), machine.usable_bytes)
    )


def _parse_process_name(recipe: Recipe, name: str) -> tuple[int | None, str]:
    """(index of the stage, what the process does in it) of a row of the estimate; no stage for what
    is done between them.
    """
    for index in range(len(recipe.stages)):
        label = recipe.stage_label(0, index)
        if name.startswith(f"{label} "):
            return index, name.removeprefix(f"{label} ")
    return None, name


def _build_machine(key: str, pod: PodConfig, processes: int) -> Machine:
    main_memory = _parse_size(pod.mem) / processes
    if not pod.gpus:
        return Machine(key, MAIN_MEMORY, main_memory, False, main_memory, processes)
    kind = pod.accelerator or "a GPU of unknown kind"
    return Machine(key, kind, _bytes_of_gpu(pod), True, main_memory, processes)


def _build_ray_machine(
    index: int, group: RayWorkersConfig, workers: WorkersConfig, deployment: DeploymentConfig
) -> Machine:
    key = f"ray_cluster.workers.{index}"
    cluster = deployment.ray_cluster
    main_memory = _parse_size(group.mem)
    if not (group.gpus and workers.gpus):
        return Machine(key, MAIN_MEMORY, main_memory, False, main_memory)
    whole = _bytes_of_gpu(cluster)
    share = min(1.0, workers.gpus)
    name = f"{cluster.accelerator or 'a GPU of unknown kind'}" + (
        f" ({share:g} of it)" if share < 1 else ""
    )
    sharing = max(1, min(workers.count, int(group.gpus / workers.gpus)))
    return Machine(
        key, name, None if whole is None else whole * share, True, main_memory / sharing, sharing
    )


def _bytes_of_gpu(pod: PodConfig) -> int | None:
    if pod.gpu_memory:
        return _parse_size(pod.gpu_memory)
    known = GPU_GIB.get(pod.accelerator or "")
    return None if known is None else known * GIB


def _parse_size(size: str) -> int:
    return int(size[:-2]) * UNITS[size[-2:]]


def _suggest_fixes(made: Estimate, name: str, machine: Machine, need: float) -> list[str]:
    """A change of the recipe or the deployment with which it fits, and a machine on which it
    does."""
    found = []
    for changed, change in _iterate_changes(made, name):
        less = _needed_bytes(changed, name, machine)
        kept = _offloaded_bytes(changed, name, machine)
        if less <= machine.usable_bytes and kept <= max(
            machine.main_memory, _offloaded_bytes(made, name, machine)
        ):
            found.append(f"set {change} ({less / GIB:.1f} GiB)")
            break
    if not machine.gpu:
        return [
            *found,
            f"raise {machine.key}.mem by {math.ceil((need - machine.usable_bytes) / GIB)}Gi",
        ]
    key = f"{machine.key.partition('.')[0]}.accelerator"
    larger = [kind for kind, size in GPU_GIB.items() if size * GIB * USABLE >= need]
    found += [f"set {key} to {larger[0]}"] if larger else []
    return found or ["take a smaller model or size: no GPU that is known here holds it"]


def _iterate_changes(made: Estimate, name: str) -> Iterator[tuple[Estimate, str]]:
    """The estimate with other keys, in turn: first what changes only the time, last what trains
    other parameters.
    """
    stage, role = _parse_process_name(made.recipe, name)
    settings = made.recipe.evaluation if stage is None else made.recipe.stages[stage]
    key = "evaluation" if stage is None else f"stages.{stage}"
    powers = range(0 if role == "text encoding" else settings.micro_batch.bit_length())
    sizes = [settings.micro_batch // 2**power for power in powers]
    for size in sizes[1:]:
        yield _estimate_changed_recipe(made, {f"{key}.micro_batch": size})
    if role == "training" and not made.recipe.model.gradient_checkpointing:
        for size in sizes:
            yield _estimate_changed_recipe(
                made, {"model.gradient_checkpointing": True, f"{key}.micro_batch": size}
            )
    if (
        role == "training"
        and stage is not None
        and made.recipe.stages[stage].optimizer.has_divisible_state
    ):
        yield from _iterate_process_counts(made, stage)
    if made.recipe.policy.train == "full":
        if all(stage.optimizer.has_divisible_state for stage in made.recipe.stages):
            yield _estimate_changed_recipe(made, {"model.cpu_offload": True})
        yield _estimate_changed_recipe(made, {"policy.train": "lora"})


def _iterate_process_counts(made: Estimate, stage: int) -> Iterator[tuple[Estimate, str]]:
    """The estimate with twice as many training processes, and so on."""
    config = made.recipe.stages[stage]
    processes = config.resources.training.count if config.kind == "online" else made.processes
    while (processes := 2 * processes) <= MAX_PROCESSES:
        if config.kind == "online":
            yield _estimate_changed_recipe(
                made,
                {
                    f"stages.{stage}.placement": "ray",
                    f"stages.{stage}.resources.training.count": processes,
                },
            )
        else:
            changed, _ = _estimate_changed_recipe(made, {}, processes)
            yield changed, f"train_processes: {processes} in the deployment"


def _estimate_changed_recipe(
    made: Estimate, changed: dict[str, Any], processes: int | None = None
) -> tuple[Estimate, str]:
    """The estimate with other values at dotted keys, which do not change the model's sizes; and the
    keys in words.
    """
    from ebbflow.estimate.run import estimate_from_sizes

    recipe = made.recipe
    for key, value in changed.items():
        recipe = _replace_value(recipe, key.split("."), value)
    words = " and ".join(f"{key}: {str(value).lower()}" for key, value in changed.items())
    spread = (made.nodes, made.hybrid, made.context_parallel)
    return (
        estimate_from_sizes(
            recipe, processes or made.processes, made.sizes, made.sample, *spread, made.evaluated
        ),
        words,
    )


def _replace_value(part: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    if isinstance(part, list):
        index = int(first)
        return [*part[:index], _replace_value(part[index], rest, value), *part[index + 1 :]]
    return part.model_copy(
        update={first: _replace_value(getattr(part, first), rest, value) if rest else value}
    )
