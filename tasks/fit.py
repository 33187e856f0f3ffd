"""The comparison of what an estimate needs with the machines of a deployment, and what to change
where they do not fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.deployment import DeploymentConfig
from tasks.pod_configs import GPU_GIB, PodConfig, RayWorkersConfig

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

    Example:
        An 80 GB A100 of an offline stage with 8 processes and mem: 512Gi is
        Machine("training_group", "nvidia-a100-80gb", 80 * GIB, gpu=True, main_memory=64 * GIB,
        sharing=8), of which a process may need 72 GiB (``usable_bytes``).

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


def compare_needs(estimate: Estimate, deployment: DeploymentConfig) -> tuple[list[str], list[str]]:
    """Return (a line for each kind of process with its need and its machine, a line with the fix
    for each that does not fit).
    """
    lines = []
    misfits = []
    for name in estimate.memory:
        machine = find_machine(estimate, name, deployment)
        need = _needed_bytes(estimate, name, machine)
        fits = need <= machine.usable_bytes
        verdict = "fits" if fits else "DOES NOT FIT"
        lines.append(
            f"  {name}: {need / GIB:.1f} GiB of {machine.name}, {machine.key}:"
            f" {verdict if machine.bytes else 'unknown'}"
        )
        if not fits:
            problem = (
                f"{name} needs {need / GIB:.1f} GiB, and {machine.key} gives it"
                f" {machine.usable_bytes / GIB:.1f} GiB of {machine.name}"
            )
            fixes = _suggest_fixes(estimate, name, machine, need)
            misfits.append(f"{problem}: {', or '.join(fixes)}")
        # A process with a GPU keeps text encoders, samples and what it offloads in main memory.
        waiting = _waiting_bytes(estimate, name, machine)
        if waiting > machine.main_memory:
            # ``mem`` is of the pod, whose processes share it.
            more = math.ceil((waiting - machine.main_memory) * machine.sharing / GIB)
            misfit = (
                f"{name} keeps {waiting / GIB:.1f} GiB in {MAIN_MEMORY}, and {machine.key} gives"
                f" it {machine.main_memory / GIB:.1f} GiB: raise {machine.key}.mem by {more}Gi"
            )
            offloads = estimate.memory[name].offloaded
            misfits.append(f"{misfit}, or leave model.cpu_offload out" if offloads else misfit)
    return lines, misfits


def _needed_bytes(estimate: Estimate, name: str, machine: Machine) -> int:
    """Return the bytes that a process needs: of its GPU, or without one, of main memory."""
    memory = estimate.memory[name]
    if machine.gpu:
        return memory.peak_bytes
    # Without a GPU nothing is moved away: what would be offloaded is in the same memory.
    return memory.peak_bytes + memory.main_memory_bytes


def _waiting_bytes(estimate: Estimate, name: str, machine: Machine) -> int:
    """Return the bytes in main memory of a process with a GPU; 0 for one without, whose need has
    them.
    """
    return estimate.memory[name].main_memory_bytes if machine.gpu else 0


def find_machine(estimate: Estimate, name: str, deployment: DeploymentConfig) -> Machine:
    """Find the machine of a process that an estimate names; of several groups of Ray workers the
    largest that suits.
    """
    stage, role = _parse_process_name(estimate.recipe, name)
    # A process for each GPU (``tasks.elastic.EveryGpu``); in main memory they share the pod.
    pod = deployment.accelerated
    generating = _build_machine("accelerated", pod, max(1, pod.gpus))
    if stage is None:  # between the stages: evaluations, text encoding
        return generating
    config = estimate.recipe.stages[stage]
    grouped = config.kind == "offline" and role == "training"
    if grouped or (config.kind == "online" and config.placement == "colocated"):
        return _build_machine("training_group", deployment.training_group, estimate.processes)
    if config.kind == "offline" and config.engine == "diffusers":
        return generating
    if config.kind != "online" or config.placement != "ray":
        return _build_machine("accelerated", pod, 1)
    # Ray chooses the pod by what an actor asks for: one with a GPU goes where GPUs are.
    workers: WorkersConfig = getattr(config.resources, {"rewards": "reward"}.get(role, role))
    groups = [
        _build_ray_machine(index, group, workers, deployment)
        for index, group in enumerate(deployment.ray_cluster.workers)
    ]
    return max(
        groups, key=lambda machine: (machine.gpu == bool(workers.gpus), machine.usable_bytes)
    )


def _parse_process_name(recipe: Recipe, name: str) -> tuple[int | None, str]:
    """Return (index of the stage, what the process does in it) of a row of the estimate; no stage
    for what is done between them.

    Example:
        "1.2 offline training" is (1, "training"), and "evaluation" is (None, "evaluation").
    """
    for index in range(len(recipe.stages)):
        label = recipe.stage_label(0, index)
        if name.startswith(f"{label} "):
            return index, name.removeprefix(f"{label} ")
    return None, name


def _build_machine(key: str, pod: PodConfig, processes: int) -> Machine:
    """Build the machine of one of the processes that share a pod, each with a GPU of its own."""
    main_memory = _parse_size(pod.mem) / processes
    if not pod.gpus:
        return Machine(key, MAIN_MEMORY, main_memory, False, main_memory, processes)
    kind = pod.accelerator or "a GPU of unknown kind"
    return Machine(key, kind, _bytes_of_gpu(pod), True, main_memory, processes)


def _build_ray_machine(
    index: int, group: RayWorkersConfig, workers: WorkersConfig, deployment: DeploymentConfig
) -> Machine:
    """Build the machine of one actor in a pod of a group of Ray workers."""
    key = f"ray_cluster.workers.{index}"
    cluster = deployment.ray_cluster
    main_memory = _parse_size(group.mem)
    if not (group.gpus and workers.gpus):
        return Machine(key, MAIN_MEMORY, main_memory, False, main_memory)
    # Actors may ask for a part of a GPU: Ray counts it, nothing enforces it, and they share memory.
    whole = _bytes_of_gpu(cluster)
    share = min(1.0, workers.gpus)
    name = cluster.accelerator or "a GPU of unknown kind"
    if share < 1:
        name += f" ({share:g} of it)"
    sharing = max(1, min(workers.count, int(group.gpus / workers.gpus)))
    return Machine(
        key, name, None if whole is None else whole * share, True, main_memory / sharing, sharing
    )


def _bytes_of_gpu(pod: PodConfig) -> int | None:
    """Return the memory of a GPU of the pod; None where its kind is not known."""
    if pod.gpu_memory:
        return _parse_size(pod.gpu_memory)
    known = GPU_GIB.get(pod.accelerator or "")
    return None if known is None else known * GIB


def _parse_size(size: str) -> int:
    return int(size[:-2]) * UNITS[size[-2:]]


def _suggest_fixes(estimate: Estimate, name: str, machine: Machine, need: float) -> list[str]:
    """Suggest a change of the recipe or the deployment with which it fits, and a machine on which
    it does.
    """
    fixes = []
    # A change must not move the problem to main memory, unless that was too small before.
    allowed = max(machine.main_memory, _waiting_bytes(estimate, name, machine))
    for changed, change in _iterate_changes(estimate, name):
        changed_need = _needed_bytes(changed, name, machine)
        waiting = _waiting_bytes(changed, name, machine)
        if changed_need <= machine.usable_bytes and waiting <= allowed:
            fixes.append(f"set {change} ({changed_need / GIB:.1f} GiB)")
            break
    if not machine.gpu:
        more = math.ceil((need - machine.usable_bytes) / GIB)
        return [*fixes, f"raise {machine.key}.mem by {more}Gi"]
    key = f"{machine.key.partition('.')[0]}.accelerator"
    # The smallest GPU that holds it: GPU_GIB is in ascending order.
    larger = [kind for kind, size in GPU_GIB.items() if size * GIB * USABLE >= need]
    if larger:
        fixes.append(f"set {key} to {larger[0]}")
    return fixes or ["take a smaller model or size: no GPU that is known here holds it"]


def _iterate_changes(estimate: Estimate, name: str) -> Iterator[tuple[Estimate, str]]:
    """Iterate over the estimate with other keys, in turn: first what changes only the time, last
    what trains other parameters.
    """
    stage, role = _parse_process_name(estimate.recipe, name)
    settings = estimate.recipe.evaluation if stage is None else estimate.recipe.stages[stage]
    key = "evaluation" if stage is None else f"stages.{stage}"
    # Halves of the micro-batch, down to 1. Text encoding does not depend on it.
    powers = range(0 if role == "text encoding" else settings.micro_batch.bit_length())
    sizes = [settings.micro_batch // 2**power for power in powers]
    for size in sizes[1:]:
        yield _estimate_changed_recipe(estimate, {f"{key}.micro_batch": size})
    if role == "training" and not estimate.recipe.model.gradient_checkpointing:
        for size in sizes:
            yield _estimate_changed_recipe(
                estimate, {"model.gradient_checkpointing": True, f"{key}.micro_batch": size}
            )
    # More processes help where the optimiser's state can be sharded over them.
    if (
        role == "training"
        and stage is not None
        and estimate.recipe.stages[stage].optimizer.has_divisible_state
    ):
        yield from _iterate_process_counts(estimate, stage)
    if estimate.recipe.policy.train == "full":
        if all(stage.optimizer.has_divisible_state for stage in estimate.recipe.stages):
            yield _estimate_changed_recipe(estimate, {"model.cpu_offload": True})
        yield _estimate_changed_recipe(estimate, {"policy.train": "lora"})


def _iterate_process_counts(estimate: Estimate, stage: int) -> Iterator[tuple[Estimate, str]]:
    """Iterate over the estimate with twice as many training processes, and so on."""
    config = estimate.recipe.stages[stage]
    processes = estimate.processes
    on_ray = False
    if config.kind == "online" and config.placement != "colocated":
        processes = config.resources.training.count
        on_ray = True
    processes *= 2
    while processes <= MAX_PROCESSES:
        if on_ray:
            yield _estimate_changed_recipe(
                estimate,
                {
                    f"stages.{stage}.placement": "ray",
                    f"stages.{stage}.resources.training.count": processes,
                },
            )
        else:
            changed, _ = _estimate_changed_recipe(estimate, {}, processes)
            yield changed, f"train_processes: {processes} in the deployment"
        processes *= 2


def _estimate_changed_recipe(
    estimate: Estimate, changed: dict[str, Any], processes: int | None = None
) -> tuple[Estimate, str]:
    """Return the estimate with other values at dotted keys, which do not change the model's sizes,
    and the keys in words.
    """
    from ebbflow.estimate.run import estimate_from_sizes

    recipe = estimate.recipe
    for key, value in changed.items():
        recipe = _replace_value(recipe, key.split("."), value)
    words = " and ".join(f"{key}: {str(value).lower()}" for key, value in changed.items())
    # From the sizes that the estimate has, which these keys do not change.
    changed_estimate = estimate_from_sizes(
        recipe,
        processes or estimate.processes,
        estimate.sizes,
        estimate.sample,
        estimate.nodes,
        estimate.sharding,
        estimate.context_parallel,
        estimate.evaluated,
    )
    return changed_estimate, words


def _replace_value(part: Any, path: list[str], value: Any) -> Any:
    """Copy a part of a recipe with another value at ``path``, such as ["stages", "0", "steps"]."""
    first, *rest = path
    if isinstance(part, list):
        index = int(first)
        return [*part[:index], _replace_value(part[index], rest, value), *part[index + 1 :]]
    if rest:
        value = _replace_value(getattr(part, first), rest, value)
    # model_copy checks nothing, and must not: a recipe may be invalid between two changed keys.
    return part.model_copy(update={first: value})
