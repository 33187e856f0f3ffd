"""The deployment: image, machine and retries of each kind of task, from one YAML file that is read
when you register.

``EBBFLOW_DEPLOYMENT`` names the file; without it everything runs on CPUs in one image.
``EBBFLOW_TRAIN_PROCESSES`` overrides the file's ``train_processes``, and ``EBBFLOW_TRAIN_NODES``
its ``train_nodes``; no other key affects local runs, where all processes are on this machine.
containers/deployment.example.yaml shows every key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from ebbflow.recipe.base import Strict, explain_validation_error, locate_nowhere
from ebbflow.recipe.yaml_text import YamlText, describe_yaml_error, read_yaml
from tasks.schedules import NotificationsConfig, ScheduleConfig

FILE = "EBBFLOW_DEPLOYMENT"
OVERRIDES = {"EBBFLOW_TRAIN_PROCESSES": "train_processes", "EBBFLOW_TRAIN_NODES": "train_nodes"}
"""Environment variables, and the keys of the file that they override."""


class DeploymentError(Exception):
    """An invalid deployment: names the key, the value and the fix."""


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


FLYTE_PREFIXES = ("FLYTE_INTERNAL_", "_F_")
FLYTE_VARIABLES = frozenset(
    {
        "FLYTE_ATTEMPT_NUMBER",
        "FLYTE_EXECUTION_URL",
        "FLYTE_K8S_ARRAY_INDEX",
        "BATCH_JOB_ARRAY_INDEX_VAR_NAME",
        # Of the pods of a Ray cluster.
        "CPU_LIMITS",
        "CPU_REQUEST",
        "MEMORY_LIMITS",
        "MEMORY_REQUESTS",
        "MY_POD_IP",
        "MY_POD_NAME",
        "RAY_DISABLE_DOCKER_CPU_WARNING",
        "TYPE",
    }
)
"""Environment variables that Flyte puts into pods."""


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
    """One process that generates or trains: rollouts, online stages, evaluations, base models."""

    cpu: Cores = 2
    mem: Size = "8Gi"
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


class HubSecretConfig(Strict):
    """The cluster's secret with the token for the Hugging Face hub."""

    group: str
    """On Kubernetes, the name of the secret."""
    key: str
    """The key in the secret."""


class SecretConfig(HubSecretConfig):
    """A secret of the cluster that every task gets: of MLflow, of a reward server, of an object
    store.
    """

    variable: Annotated[str, Field(pattern="^[A-Z_][A-Z0-9_]*$")]
    """The environment variable that holds it."""
    file: bool = False
    """The secret lies in a file, and the variable holds its path."""


class PricesConfig(Strict):
    """What an hour of a machine's parts costs, for the ledger of a run; 0 is unknown."""

    gpu_hour: float = Field(0.0, ge=0)
    core_hour: float = Field(0.0, ge=0)
    currency: Annotated[str, Field(min_length=1, max_length=8)] = "USD"


class DeploymentConfig(Strict):
    """All settings of a deployment."""

    train_processes: AtLeastOne = 2
    """Processes, on each node, that train an offline stage or run an online one with ``placement:
    colocated``.
    """
    train_nodes: AtLeastOne = 1
    """Nodes of these processes. More than one are a PyTorchJob of the Kubeflow training operator.
    """
    train_sharding: Literal["full", "hybrid", "replicated"] = "full"
    """full: FSDP2 shards the model over all processes; hybrid: inside each node, and replicates it
    over the nodes (HSDP); replicated: each process holds all of it, and only gradients travel.
    """
    train_context_parallel: AtLeastOne = 1
    """Processes of a node that share the tokens of each sample in training, for latents whose
    activations do not fit one GPU.
    """
    image_registry: str | None = None
    """Registry of the CPU image (tasks/images.py), which Flyte then builds when you register;
    default: no image is built.
    """
    hub_secret: HubSecretConfig | None = None
    """The token for gated base models and LoRA; the tasks that download them get it as
    ``HF_TOKEN``.
    """
    secrets: list[SecretConfig] = []
    env: dict[str, str] = {}
    """Environment variables of every pod; no secrets. Leave out those that your Flyte gives to
    every pod itself (``default-env-vars`` of its configuration): a variable that is there twice
    fails stages on Ray.
    """
    labels: dict[str, Label] = {}
    """Labels of every pod."""
    service_account: str | None = None
    """Of every pod, also of Ray's head and workers, and of the runs of the launch plans."""
    image_pull_secrets: list[str] = []
    priority_class: str | None = None
    accelerator_label: str = "k8s.amazonaws.com/accelerator"
    """The label that nodes carry their kind of GPU in, as Flyte's own configuration has it
    (``gpu-device-node-label``).
    """
    notifications: NotificationsConfig = NotificationsConfig()
    prices: PricesConfig = PricesConfig()
    """Prices of an hour of a GPU and of a core. The report of a run then has its costs in money."""
    schedules: list[ScheduleConfig] = []
    """Default: ``nightly``, at 02:00 UTC, if ``EBBFLOW_RECIPE`` names its recipe."""
    light: PodConfig = PodConfig()
    """Bookkeeping: prompts, tracking, advantages, the gate, the registry."""
    downloader: DownloaderConfig = DownloaderConfig()
    scorer: ScorerConfig = ScorerConfig()
    accelerated: AcceleratedConfig = AcceleratedConfig()
    training_group: TrainingGroupConfig = TrainingGroupConfig()
    ray_cluster: RayClusterConfig = RayClusterConfig()

    @model_validator(mode="after")
    def _check_names_of_schedules(self) -> DeploymentConfig:
        names = ["manual", *(schedule.name for schedule in self.schedules)]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"schedules: {repeated[0]} names two launch plans; rename one")
        return self

    @model_validator(mode="after")
    def _check_variables(self) -> DeploymentConfig:
        # A variable that is there twice has one of two values in a pod, and Kubernetes refuses a
        # RayJob that has one, when the stage is to start.
        variables = [secret.variable for secret in self.secrets]
        if self.hub_secret:
            variables.append("HF_TOKEN")
        for name in self.env:
            if not re.fullmatch(r"[-._a-zA-Z][-._a-zA-Z0-9]*", name):
                raise ValueError(f"env: {name!r} is no name of an environment variable")
            if name == FILE:
                raise ValueError(f"env: every pod has {FILE} by itself; leave it out")
            if name.startswith(FLYTE_PREFIXES) or name in FLYTE_VARIABLES:
                raise ValueError(f"env: Flyte sets {name} itself; leave it out")
            if name in variables:
                raise ValueError(f"env: {name} is also the variable of a secret; leave one out")
        repeated = sorted({name for name in variables if variables.count(name) > 1})
        if repeated:
            raise ValueError(f"secrets: {', '.join(repeated)} is the variable of two secrets")
        return self

    @model_validator(mode="after")
    def _check_context_parallel(self) -> DeploymentConfig:
        # Processes that share tokens talk in every layer, so they are on one node.
        if self.train_processes % self.train_context_parallel:
            raise ValueError(
                f"train_context_parallel = {self.train_context_parallel} does not divide"
                f" train_processes = {self.train_processes}; change one of them"
            )
        return self


def read_deployment(environment: Mapping[str, str]) -> DeploymentConfig:
    """Read the deployment that the environment variables name.

    Raises:
        DeploymentError: the file does not exist or is not a valid deployment.
    """
    # An empty variable counts as not set, as in shells.
    variables = {name: environment[name] for name in (FILE, *OVERRIDES) if environment.get(name)}
    mapping = _read_mapping(variables[FILE]) if FILE in variables else None
    settings: dict[str, Any] = mapping.data if mapping else {}
    settings |= {key: variables[name] for name, key in OVERRIDES.items() if name in variables}
    try:
        return DeploymentConfig.model_validate(settings)
    except ValidationError as error:
        listed = ", ".join(f"{name}={_describe_source(text)}" for name, text in variables.items())
        # A text, as in a pod, has no file whose lines could be named.
        locate = locate_nowhere
        if mapping and not _is_deployment_text(variables[FILE]):
            locate = mapping.locate_key
        raise DeploymentError(
            f"{listed}:\n{explain_validation_error(error, DeploymentConfig, locate)}"
        ) from None


def build_pod_environment(deployment: DeploymentConfig) -> dict[str, str]:
    """Build the environment with which a pod reads the same deployment: the variable holds its
    text, as pods do not have the file.

    Every pod gets all of it, because a dynamic compiles its tasks, with their images and GPUs, in
    its own pod.
    """
    return {**deployment.env, FILE: deployment.model_dump_json(exclude_defaults=True)}


def _is_deployment_text(file_or_text: str) -> bool:
    """Return whether it is the deployment itself, as in a pod (``build_pod_environment``)."""
    return file_or_text.startswith("{")


def _describe_source(file_or_text: str) -> str:
    """Describe a file by its name; a text is not repeated, since it may hold what does not belong
    there.
    """
    return "{...}" if _is_deployment_text(file_or_text) else file_or_text


def _read_mapping(file_or_text: str) -> YamlText:
    """Read the mapping in a file, or in the text itself."""
    if not _is_deployment_text(file_or_text) and not Path(file_or_text).is_file():
        raise DeploymentError(
            f"{FILE}={file_or_text}: there is no such file; copy containers/deployment.example.yaml"
        )
    name = _describe_source(file_or_text)
    try:
        is_text = _is_deployment_text(file_or_text)
        mapping = read_yaml(file_or_text if is_text else Path(file_or_text).read_bytes(), name)
    except (yaml.YAMLError, ValueError) as error:
        raise DeploymentError(f"{FILE}={describe_yaml_error(error, name)}") from None
    if not isinstance(mapping.data, dict):
        raise DeploymentError(
            f"{FILE}={name} must be a mapping of keys, got {type(mapping.data).__name__}"
        )
    return mapping
