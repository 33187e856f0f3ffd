"""The pods of each kind of task: cores, memory, disk, GPUs and the nodes they may run on.

``tasks.deployment`` reads them from the deployment file.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from ebbflow.recipe.base import Strict

GPU_GIB = {
    "nvidia-tesla-t4": 15,
    "nvidia-a10g": 22,
    "nvidia-l4": 22,
    "nvidia-tesla-a100": 40,
    "nvidia-l40s": 45,
    "nvidia-h100": 79,
    "nvidia-a100-80gb": 80,
    "nvidia-rtx-pro-6000": 95,
    "nvidia-h200": 140,
}
"""GiB that nvidia-smi shows of a GPU, rounded down, by the accelerator's name in Flyte; smaller
ones first.
"""


def _check_size(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[1-9]\d*(Mi|Gi|Ti)", value):
        raise ValueError("give a whole number and a unit, such as 512Mi, 8Gi or 1Ti")
    return value


def _parse_cores(value: Any) -> float:
    """Parse cores as Kubernetes writes them: a number or thousandths of a core."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        # The words of every other number's error; ``Strict`` puts another type in place of true.
        raise PydanticCustomError("cores", "Input should be a valid number of cores")
    match = re.fullmatch(r"(\d+)m|(\d+(?:\.\d+)?)", str(value))
    if not match:
        raise ValueError("give a number of cores, such as 2 or 0.5, or thousandths, such as 500m")
    milli = float(match[1]) if match[1] else float(match[2]) * 1000
    # Kubernetes refuses a finer quantity, and a pod without cores cannot run.
    if milli < 1 or abs(milli - round(milli)) > 1e-6:
        raise ValueError("give at least 0.001 cores, in whole thousandths")
    return round(milli) / 1000


def format_cores(cores: float) -> str:
    """Format cores as Kubernetes reads them, such as 2 or 0.4."""
    # Thousandths are what Kubernetes counts, and a product of floats has more digits.
    return f"{round(cores, 3):.3f}".rstrip("0").rstrip(".")


def _check_label(value: str) -> str:
    """Check the value of a label, as Kubernetes does when it makes the pod."""
    if not re.fullmatch(r"([A-Za-z0-9]([-\w.]*[A-Za-z0-9])?)?", value, re.ASCII) or len(value) > 63:
        raise ValueError(
            "a label has at most 63 letters, digits, '-', '_' and '.', and begins and ends with a"
            " letter or digit"
        )
    return value


Size = Annotated[str, BeforeValidator(_check_size)]
Label = Annotated[str, AfterValidator(_check_label)]
Cores = Annotated[float, BeforeValidator(_parse_cores)]
AtLeastOne = Annotated[int, Field(ge=1)]
AtLeastZero = Annotated[int, Field(ge=0)]


class TolerationConfig(Strict):
    """A taint of nodes that a pod may run on all the same, as Kubernetes has it."""

    key: str | None = None
    """Of the taint; default: any."""
    operator: Literal["Exists", "Equal"]
    """Default: ``Equal`` where there is a ``value``, otherwise ``Exists``."""
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Default: all three."""

    @model_validator(mode="before")
    @classmethod
    def _set_operator_of_value(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data  # pydantic says what is wrong with it
        return {"operator": "Exists" if data.get("value") is None else "Equal"} | data

    @model_validator(mode="after")
    def _check_kubernetes_rules(self) -> TolerationConfig:
        # Else Kubernetes would refuse the pod, when the task is to start.
        if self.operator == "Exists" and self.value is not None:
            raise ValueError(
                f"operator: Exists takes no value, got {self.value!r}; leave one of them out"
            )
        if self.operator == "Equal" and not self.key:
            raise ValueError("operator: Equal needs the key of the taint")
        return self


class NodesConfig(Strict):
    """Which nodes a pod may run on. The GPUs that it asks for, and their kind, are other keys."""

    node_selector: dict[str, str] = {}
    """Labels that a node must have."""
    tolerations: list[TolerationConfig] = []
    affinity: dict[str, Any] | None = None
    """``affinity`` of a pod, as Kubernetes has it (``nodeAffinity``, ``podAffinity``,
    ``podAntiAffinity``).
    """


class PodConfig(NodesConfig):
    """The pod of one kind of task."""

    image: str | None = None
    """The container image; default: that of ``image_registry``, or else the one given when
    registering (``--image``).
    """
    cpu: Cores = 1
    """Cores, whole or not: 2, 0.4 and 500m. This and what follows is both request and limit, so
    that the pod is evicted last.
    """
    mem: Size = "2Gi"
    """Memory."""
    ephemeral_storage: Size | None = None
    """Local disk for models and samples while a task runs; default: the cluster's."""
    gpus: AtLeastZero = 0
    """GPUs."""
    accelerator: str | None = None
    """The kind of GPU, as the cluster's nodes are labelled; default: any."""
    gpu_memory: Size | None = None
    """Of each GPU, which the dry run compares with what a recipe needs; default: that of the
    accelerator, where it is known.
    """
    shared_memory: Size | None = None
    """Limit of /dev/shm, where processes exchange tensors; counts as memory. Default: 64 MiB."""
    grace_period: AtLeastZero = 30
    """Seconds from SIGTERM to SIGKILL on preemption; a checkpoint must fit in."""
    interruptible: bool = False
    """Whether it may run on preemptible (spot) machines."""
    retries: AtLeastZero = 2
    """Retries after recoverable errors. Other errors end the run; lost machines are counted
    separately.
    """
    max_hours: Annotated[float, Field(gt=0)] | None = None
    """Hours that the pod of an attempt may run. They begin when a node takes the pod: waiting for a
    machine does not count, pulling the image does. Kubernetes then ends the pod as on preemption,
    and Flyte retries the task, which counts against ``retries``. Default: no limit.

    Pods that an operator makes (``ray_cluster``, and ``training_group`` with several
    ``train_nodes``) have Flyte's timeout instead, which counts waiting, too; and twice these hours
    end the task, whatever its retries.
    """

    @model_validator(mode="after")
    def _check_accelerator(self) -> Self:
        if self.accelerator and not self.gpus:
            raise ValueError(
                f"accelerator = {self.accelerator!r} needs gpus >= 1; set gpus or remove"
                " accelerator"
            )
        return self


class ScorerConfig(PodConfig):
    """Rewards of an offline stage."""

    cpu: Cores = 2
    mem: Size = "4Gi"


class AcceleratedConfig(PodConfig):
    """Rollouts and evaluations, with a process on each of the pod's ``gpus``; online stages in one
    process, base models.
    """

    cpu: Cores = 2
    """Cores of all processes together."""
    mem: Size = "8Gi"
    """Memory of all processes together."""
    grace_period: AtLeastZero = 300


class TrainingGroupConfig(PodConfig):
    """The ``train_processes`` processes on each of ``train_nodes`` nodes, a pod each, that train an
    offline stage or run a colocated one.
    """

    cpu: Cores = 1
    """Cores of each process."""
    mem: Size = "8Gi"
    """Memory of all processes of a node together."""
    gpus: Annotated[int, Field(ge=0, le=1)] = 0
    """GPUs of each process."""
    shared_memory: Size | None = "2Gi"
    grace_period: AtLeastZero = 300


class RayWorkersConfig(NodesConfig):
    """A group of identical pods of a Ray cluster, shared by the actors of a stage."""

    name: Annotated[str, Field(pattern="^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=40)] = "workers"
    """The group's name: at most 40 lower-case letters, digits and hyphens; its pods are called by
    it.
    """
    replicas: AtLeastOne = 1
    """Pods."""
    image: str | None = None
    """The container image; default: the cluster's."""
    cpu: Cores = 4
    mem: Size = "16Gi"
    ephemeral_storage: Size | None = None
    gpus: AtLeastZero = 0


class RayClusterConfig(PodConfig):
    """The Ray cluster of an online stage with ``placement: ray``; it lives as long as the stage.

    Cores, memory, disk and nodes are the head's, which runs the stage's own process and no actor;
    KubeRay makes the pod that submits the job as large as the head. Everything else applies to all
    pods.
    """

    cpu: Cores = 2
    mem: Size = "8Gi"
    gpus: Annotated[int, Field(ge=0, le=0)] = 0
    """0: models are in the workers."""
    shared_memory: Size | None = "4Gi"
    """Of every pod. Ray's object store keeps rollouts and weights in it, and spills to disk what
    does not fit.
    """
    grace_period: AtLeastZero = 300
    keep_seconds: AtLeastZero = 0
    """How long the pods stay after the stage has ended, for a look into them; the next task may
    wait for their machines. Their logs are kept in the run's folder (``logs/``).
    """
    workers: Annotated[list[RayWorkersConfig], Field(min_length=1)] = [RayWorkersConfig()]

    @model_validator(mode="after")
    def _check_accelerator(self) -> Self:
        if self.accelerator and not any(group.gpus for group in self.workers):
            raise ValueError(
                f"accelerator = {self.accelerator!r} needs workers with gpus; set theirs or remove"
                " accelerator"
            )
        return self

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [group.name for group in self.workers]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(
                f"workers are called {', '.join(repeated)} twice; KubeRay needs names of their own"
            )
        return self

    @model_validator(mode="after")
    def _check_disk(self) -> Self:
        """Flyte merges the pods key by key, so that a group without a disk would get the head's."""
        inheriting = [
            group.name
            for group in self.workers
            if self.ephemeral_storage and not group.ephemeral_storage
        ]
        if inheriting:
            raise ValueError(
                f"workers {', '.join(inheriting)}: ephemeral_storage is left out, and they would"
                f" get the head's {self.ephemeral_storage}; state theirs"
            )
        return self


class DownloaderConfig(PodConfig):
    """The download of a base model: tens of GB on the way to the artifact store."""

    cpu: Cores = 2
    mem: Size = "16Gi"
    ephemeral_storage: Size | None = "100Gi"
