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
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from ebbflow.recipe.base import Strict, explain_validation_error, locate_nowhere
from ebbflow.recipe.yaml_text import YamlText, describe_yaml_error, read_yaml
from tasks.pod_configs import (
    AcceleratedConfig,
    AtLeastOne,
    DownloaderConfig,
    Label,
    PodConfig,
    RayClusterConfig,
    ScorerConfig,
    TrainingGroupConfig,
)
from tasks.schedules import NotificationsConfig, ScheduleConfig

FILE = "EBBFLOW_DEPLOYMENT"
OVERRIDES = {"EBBFLOW_TRAIN_PROCESSES": "train_processes", "EBBFLOW_TRAIN_NODES": "train_nodes"}
"""Environment variables, and the keys of the file that they override."""


class DeploymentError(Exception):
    """An invalid deployment: names the key, the value and the fix."""


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
    """Processes of a node that share the tokens of each sample in offline training and in online
    stages with ``placement: colocated``, for latents whose activations do not fit one GPU.
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
