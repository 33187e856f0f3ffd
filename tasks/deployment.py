"""What a deployment decides: image, machine and patience of each kind of task. One YAML file, named when you register.

``EBBFLOW_DEPLOYMENT`` names the file; without it everything runs on CPUs in one image. ``EBBFLOW_TRAIN_PROCESSES`` goes before
the file's ``train_processes``, the only key that local runs heed. containers/deployment.example.yaml shows every key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from ebbflow.recipe.base import Strict, explain
from ebbflow.recipe.recipe import UniqueKeys

FILE, TRAIN_PROCESSES = "EBBFLOW_DEPLOYMENT", "EBBFLOW_TRAIN_PROCESSES"


class DeploymentError(Exception):
    """A deployment that cannot be: names the key, the value and the way out."""


def _size(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[1-9]\d*(Mi|Gi|Ti)", value):
        raise ValueError("give a whole number and its unit, like 512Mi, 8Gi or 1Ti")
    return value


Size = Annotated[str, BeforeValidator(_size)]
Some = Annotated[int, Field(ge=1)]
SomeOrNone = Annotated[int, Field(ge=0)]


class Pod(Strict):
    """The pod that one kind of task gets."""

    image: str | None = None
    """The container image; without one, that of ``image_registry``, or else the one given when registering (``--image``)."""
    cpu: Some = 1
    """Cores; requested and the limit, as all that follows: a pod that gets what it asked for is evicted last."""
    mem: Size = "2Gi"
    """Memory."""
    ephemeral_storage: Size | None = None
    """Local disk, where models and samples lie while a task runs; without it, what the cluster gives."""
    gpus: SomeOrNone = 0
    """GPUs."""
    accelerator: str | None = None
    """The kind of GPU, as the cluster's nodes are labelled; without it, any."""
    shared_memory: Size | None = None
    """At most so much in /dev/shm, where processes exchange tensors; counts as memory. Without it, 64 MiB."""
    grace_period: SomeOrNone = 30
    """Seconds from the notice to the end when a pod is taken away; a checkpoint must fit."""
    interruptible: bool = False
    """Whether it may run on machines that can be taken away."""
    retries: SomeOrNone = 2
    """How often it starts again after an error that calls itself recoverable. Others end the run; lost machines count apart."""

    @model_validator(mode="after")
    def _an_accelerator_is_a_gpu(self) -> Self:
        if self.accelerator and not self.gpus:
            raise ValueError(f"accelerator = {self.accelerator!r} needs gpus of at least 1; set gpus or leave accelerator out")
        return self


class Scorer(Pod):
    """Rewards of an offline stage."""

    cpu: Some = 2
    mem: Size = "4Gi"


class Accelerated(Pod):
    """One process that generates or trains: rollouts, online stages, evaluations, base models."""

    cpu: Some = 2
    mem: Size = "8Gi"
    grace_period: SomeOrNone = 300


class TrainingGroup(Pod):
    """The ``train_processes`` processes of an offline stage, on one node."""

    cpu: Some = 1
    """Cores of each process."""
    mem: Size = "8Gi"
    """Memory of all processes together."""
    gpus: Annotated[int, Field(ge=0, le=1)] = 0
    """GPUs of each process."""
    shared_memory: Size | None = "2Gi"
    grace_period: SomeOrNone = 300


class RayWorkers(Strict):
    """Pods of a Ray cluster that are alike; the actors of a stage share them."""

    name: Annotated[str, Field(pattern="^[a-z]([-a-z0-9]*[a-z0-9])?$")] = "workers"
    """Of the group: small letters, digits and hyphens."""
    replicas: Some = 1
    """Pods."""
    image: str | None = None
    """Without one, that of the cluster."""
    cpu: Some = 4
    mem: Size = "16Gi"
    ephemeral_storage: Size | None = None
    gpus: SomeOrNone = 0


class RayCluster(Pod):
    """The Ray cluster of an online stage with ``placement: ray``, which lives as long as the stage.

    Cores, memory and disk are those of its head, where the stage's own process runs and no actor; what else is here is for all
    pods.
    """

    cpu: Some = 2
    mem: Size = "8Gi"
    gpus: Annotated[int, Field(ge=0, le=0)] = 0
    """None: models are in the workers."""
    shared_memory: Size | None = "4Gi"
    """As of every pod; Ray keeps rollouts and weights on their way there, and on disk what does not fit."""
    grace_period: SomeOrNone = 300
    workers: Annotated[list[RayWorkers], Field(min_length=1)] = [RayWorkers()]

    @model_validator(mode="after")
    def _an_accelerator_is_a_gpu(self) -> Self:
        if self.accelerator and not any(group.gpus for group in self.workers):
            raise ValueError(f"accelerator = {self.accelerator!r} needs workers with gpus; set theirs or leave accelerator out")
        return self


class Downloader(Pod):
    """The download of a base model: tens of GB on their way to the artifact store."""

    cpu: Some = 2
    mem: Size = "16Gi"
    ephemeral_storage: Size | None = "100Gi"


class HubSecret(Strict):
    """Where the cluster keeps the token for the Hugging Face hub."""

    group: str
    """On Kubernetes the name of the secret."""
    key: str
    """The key in it."""


class Deployment(Strict):
    """Everything that a deployment decides."""

    train_processes: Some = 2
    """Processes of an offline stage's training, all on one node."""
    image_registry: str | None = None
    """Where Flyte pushes the CPU image of tasks/images.py, which it then builds when you register; without it, it builds none."""
    hub_secret: HubSecret | None = None
    """The token with which gated base models and LoRA are downloaded; those tasks find it in ``HF_TOKEN``."""
    light: Pod = Pod()
    """Bookkeeping: prompts, tracking, advantages, the gate, the registry."""
    downloader: Downloader = Downloader()
    scorer: Scorer = Scorer()
    accelerated: Accelerated = Accelerated()
    training_group: TrainingGroup = TrainingGroup()
    ray_cluster: RayCluster = RayCluster()


def read_deployment(environment: Mapping[str, str]) -> Deployment:
    """The deployment that environment variables name.

    Raises:
        DeploymentError: there is no such file, or it does not describe a deployment.
    """
    given = {name: environment[name] for name in (FILE, TRAIN_PROCESSES) if environment.get(name)}
    decided = _read(given[FILE]) if FILE in given else {}
    if TRAIN_PROCESSES in given:
        decided |= {"train_processes": given[TRAIN_PROCESSES]}
    try:
        return Deployment.model_validate(decided)
    except ValidationError as error:
        place = ", ".join(f"{name}={value}" for name, value in given.items())
        raise DeploymentError(f"{place}:\n{explain(error, Deployment)}") from None


def pod_environment(deployment: Deployment) -> dict[str, str]:
    """What a pod needs to read the same deployment: there the variable holds the text, since the file stayed behind.

    All of it, in every pod: a dynamic compiles its tasks in its pod, images and GPUs included.
    """
    return {FILE: deployment.model_dump_json(exclude_defaults=True)}


def _read(place: str) -> dict[str, Any]:
    """The mapping in the file ``place``, or in ``place`` itself when that is one (``pod_environment``)."""
    if not place.startswith("{") and not Path(place).is_file():
        raise DeploymentError(f"{FILE}={place}: there is no such file; containers/deployment.example.yaml is one to copy")
    try:
        decided = yaml.load(place if place.startswith("{") else Path(place).read_bytes(), UniqueKeys)
    except (yaml.YAMLError, ValueError) as error:
        raise DeploymentError(f"{FILE}={place} is not valid YAML: {error}") from None
    if not isinstance(decided, dict):
        raise DeploymentError(f"{FILE}={place} must hold a mapping of keys, got {type(decided).__name__}")
    return decided
