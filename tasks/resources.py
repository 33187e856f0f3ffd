"""The requests of each kind of task to a cluster: the only place that turns the deployment into
Flyte's arguments.
"""

from __future__ import annotations

import hashlib
import math
import os
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from flytekit import PodTemplate, Resources, Secret
from flytekit.core.resources import pod_spec_from_resources
from flytekit.extras.accelerators import GPUAccelerator

from ebbflow.compute import GPUS, count_gpus
from ebbflow.storage.sources import COMMIT, SUBMITTED
from tasks.deployment import SecretConfig, build_pod_environment, read_deployment
from tasks.flyte2 import build_limits, register_elastic_translation
from tasks.images import build_cpu_image
from tasks.pod_configs import NodesConfig, PodConfig, RayWorkersConfig, format_cores
from tasks.pod_templates import LazyPodTemplate
from tasks.sources import describe_submitted_commit, describe_submitted_sources

if TYPE_CHECKING:
    from flytekitplugins.ray import WorkerNodeConfig
    from kubernetes.client import V1PodSpec

    from ebbflow.training.distributed import Ranks

# Read once, when the tasks are registered: decorators need it, and a pod gets the same text.
DEPLOYMENT = read_deployment(os.environ)
SOURCES = describe_submitted_sources()
SUBMITTED_COMMIT = describe_submitted_commit()
register_elastic_translation()
CODE_FOLDER = "/code"
"""Where Flyte unpacks uploaded sources: an empty volume, which any user may write, also where the
image cannot be written. Ray's driver sends it to its workers.
"""
CODE_VOLUME = "code"
DEPLOYMENT_ANNOTATION = "ebbflow/deployment"
COMMIT_ANNOTATION = "ebbflow/commit"
LAUNCHER: dict[str, Any] = {
    # Where there is CUDA; elsewhere ``tasks.elastic`` forks.
    "start_method": "spawn",
    "monitor_interval": 0.1,
    # A restart inside the task would start from the checkpoint of the attempt's beginning.
    "max_restarts": 0,
    # Elastic would write into the pod template, and leave the size open.
    "increase_shared_mem": False,
}
"""Settings of torch's elastic launcher."""


def light_resources() -> dict[str, Any]:
    """Return the arguments of ``@task`` for bookkeeping: prompts, tracking, advantages, gate."""
    return _task_arguments(DEPLOYMENT.light)


def downloader_resources() -> dict[str, Any]:
    """Return those of a task that downloads a base model; a secret that the deployment names is in
    ``HF_TOKEN``.
    """
    arguments = _task_arguments(DEPLOYMENT.downloader)
    secret = DEPLOYMENT.hub_secret
    if secret is None:
        return arguments
    token = Secret(
        group=secret.group,
        key=secret.key,
        mount_requirement=Secret.MountType.ENV_VAR,
        env_var="HF_TOKEN",
    )
    return arguments | {"secret_requests": [*arguments["secret_requests"], token]}


def scorer_resources() -> dict[str, Any]:
    """Return those of the rewards of an offline stage."""
    return _task_arguments(DEPLOYMENT.scorer)


def accelerated_resources() -> dict[str, Any]:
    """Return those of one process that generates or trains, on a GPU if the deployment has one."""
    return _task_arguments(DEPLOYMENT.accelerated)


def generating_resources() -> dict[str, Any]:
    """Return those of a task that generates on all GPUs of its pod, a process on each, under
    torch's elastic launcher.
    """
    arguments = accelerated_resources()
    # One process needs no launcher. The GPUs of this machine are those of a local run.
    if max(DEPLOYMENT.accelerated.gpus, count_gpus()) < 2:
        return arguments
    from tasks.elastic import EveryGpu

    return {"task_config": EveryGpu(**LAUNCHER)} | arguments


def training_group_resources() -> dict[str, Any]:
    """Return those of ``train_processes`` processes on each of ``train_nodes`` nodes, under torch's
    elastic launcher.
    """
    from tasks.elastic import GracefulElastic

    processes = DEPLOYMENT.train_processes
    config = GracefulElastic(nnodes=DEPLOYMENT.train_nodes, nproc_per_node=processes, **LAUNCHER)
    arguments = _task_arguments(
        DEPLOYMENT.training_group, processes, has_operator=DEPLOYMENT.train_nodes > 1
    )
    return {"task_config": config} | arguments


def count_replicas(ranks: Ranks) -> int:
    """Return how many replicas of the model the ranks of a training group hold."""
    replicas = {"full": 1, "hybrid": ranks.num_nodes, "replicated": ranks.world}
    return replicas[DEPLOYMENT.train_sharding]


def ray_cluster_resources() -> dict[str, Any]:
    """Return those of the head of a Ray cluster and its workers, of a fixed size: no autoscaler."""
    from flytekitplugins.ray import HeadNodeConfig, RayJobConfig

    cluster = DEPLOYMENT.ray_cluster
    config = RayJobConfig(
        # No cores for Ray, so that no actor is placed on the head.
        head_node_config=HeadNodeConfig(
            ray_start_params={"num-cpus": "0"}, pod_template=_build_ray_head_template()
        ),
        worker_node_config=[_build_ray_workers(group) for group in cluster.workers],
        shutdown_after_job_finishes=True,
        ttl_seconds_after_finished=cluster.keep_seconds,
    )
    return {"task_config": config} | _task_arguments(cluster, has_operator=True)


def _build_ray_head_template() -> PodTemplate | None:
    """Build what the head's pod has beside the task's own pod template."""
    # Flyte's Ray plugin overwrites the service account of the task's pod with the one of its
    # configuration (``default``), before it merges this template into the pod.
    if not DEPLOYMENT.service_account:
        return None
    from kubernetes.client import V1PodSpec

    return PodTemplate(
        pod_spec=V1PodSpec(containers=[], service_account_name=DEPLOYMENT.service_account)
    )


def _build_ray_workers(group: RayWorkersConfig) -> WorkerNodeConfig:
    """Build a group of workers."""
    from flytekitplugins.ray import WorkerNodeConfig
    from kubernetes.client import V1Toleration

    # As a pod template: it replaces the head's resources and its image, which workers would get
    # otherwise.
    resources = _build_resources(group)
    pod = pod_spec_from_resources("ray-worker", resources, resources)
    pod.containers[0].image = group.image
    # Here for the same reason as in the head's template.
    pod.service_account_name = DEPLOYMENT.service_account
    nodes = _build_node_selector(group)
    # Flyte selects the kind of GPU for tasks whose own pod has GPUs; the head has none.
    accelerator = DEPLOYMENT.ray_cluster.accelerator
    if accelerator and group.gpus:
        label = DEPLOYMENT.accelerator_label
        nodes["node_selector"] = {**(nodes["node_selector"] or {}), label: accelerator}
        nodes["tolerations"] = [
            *(nodes["tolerations"] or []),
            V1Toleration(key=label, operator="Equal", value=accelerator),
        ]
    for name, value in nodes.items():
        setattr(pod, name, value)
    count = group.replicas
    template = PodTemplate(pod_spec=pod, labels=DEPLOYMENT.labels or None)
    return WorkerNodeConfig(group.name, count, count, count, pod_template=template)


def _build_node_selector(pod: NodesConfig) -> dict[str, Any]:
    """Build what selects the nodes of a pod, as Kubernetes' client names it; what is left out is
    None, which no template has.
    """
    from kubernetes.client import V1Toleration

    tolerations = [V1Toleration(**toleration.model_dump()) for toleration in pod.tolerations]
    return {
        "node_selector": pod.node_selector or None,
        "tolerations": tolerations or None,
        "affinity": pod.affinity,
    }


def _task_arguments(
    pod: PodConfig, processes: int = 1, has_operator: bool = False
) -> dict[str, Any]:
    """Build the arguments of ``@task`` for a pod; cores and GPUs are per process.

    Args:
        has_operator: an operator makes the task's pods, from a job that Flyte makes.
    """
    resources = _build_resources(pod, processes)
    limit = timedelta(hours=pod.max_hours or 0)
    # The pod's own deadline, which begins on the node. Flyte's timeout counts waiting for a
    # machine, ends the task after twice its time however many retries are left, and ends a dynamic
    # workflow in the midst of the nodes that its pod has compiled.
    pod_deadline = math.ceil(limit.total_seconds()) or None
    if has_operator:
        # A head or a worker that ended by itself would be started again by its operator.
        pod_deadline = None
    # New for every task, because Flyte may write into it: two tasks that share one crash at import.
    template = LazyPodTemplate(
        partial(_build_pod, pod, pod_deadline),
        labels=DEPLOYMENT.labels or None,
        # flytekit computes a version from the sources and the pod templates, but Flyte refuses the
        # same version with other pods, and the environment has both.
        annotations={
            DEPLOYMENT_ANNOTATION: _compute_deployment_digest(),
            COMMIT_ANNOTATION: SUBMITTED_COMMIT,
        },
    )
    image: Any = pod.image
    if not image and DEPLOYMENT.image_registry:
        image = build_cpu_image(DEPLOYMENT.image_registry)
    return {
        "container_image": image,
        "requests": resources,
        "limits": build_limits(resources),
        "accelerator": GPUAccelerator(pod.accelerator) if pod.accelerator else None,
        "shared_memory": pod.shared_memory,
        "pod_template": template,
        "interruptible": pod.interruptible,
        "retries": pod.retries,
        "timeout": limit if has_operator else timedelta(0),  # 0 is none
        "secret_requests": [_build_secret(secret) for secret in DEPLOYMENT.secrets],
        "environment": _build_environment(pod.gpus * processes),
    }


def _build_pod(pod: PodConfig, deadline: int | None) -> V1PodSpec:
    """Build the pod of a task, without resources, as the task's replace them.

    Args:
        deadline: seconds that it may run.
    """
    from kubernetes.client import (
        V1Container,
        V1EmptyDirVolumeSource,
        V1LocalObjectReference,
        V1PodSpec,
        V1Volume,
        V1VolumeMount,
    )

    secrets = [V1LocalObjectReference(name=name) for name in DEPLOYMENT.image_pull_secrets]
    container = V1Container(
        name="primary",
        working_dir=CODE_FOLDER,
        volume_mounts=[V1VolumeMount(name=CODE_VOLUME, mount_path=CODE_FOLDER)],
    )
    return V1PodSpec(
        containers=[container],
        volumes=[V1Volume(name=CODE_VOLUME, empty_dir=V1EmptyDirVolumeSource())],
        active_deadline_seconds=deadline,
        termination_grace_period_seconds=pod.grace_period,
        service_account_name=DEPLOYMENT.service_account,
        image_pull_secrets=secrets or None,
        priority_class_name=DEPLOYMENT.priority_class,
        **_build_node_selector(pod),
    )


def _compute_deployment_digest() -> str:
    """Compute a digest of the whole deployment."""
    return hashlib.sha256(DEPLOYMENT.model_dump_json().encode()).hexdigest()[:12]


def _build_environment(gpus: int) -> dict[str, str]:
    """Build the environment of a pod, with the number of its GPUs: its processes refuse to train on
    the CPU instead (``ebbflow.compute``).
    """
    # Before the image's own sources: an image may set a PYTHONPATH, to which Flyte appends.
    environment = {"PYTHONPATH": CODE_FOLDER} | build_pod_environment(DEPLOYMENT)
    environment[SUBMITTED] = SOURCES
    # Without one, that of the image stays.
    if SUBMITTED_COMMIT:
        environment[COMMIT] = SUBMITTED_COMMIT
    return environment | {GPUS: str(gpus)} if gpus else environment


def _build_secret(secret: SecretConfig) -> Secret:
    """Build Flyte's request of a secret, as a variable or as a file whose path is in it."""
    mount = Secret.MountType.FILE if secret.file else Secret.MountType.ENV_VAR
    return Secret(
        group=secret.group, key=secret.key, mount_requirement=mount, env_var=secret.variable
    )


def _build_resources(pod: PodConfig | RayWorkersConfig, processes: int = 1) -> Resources:
    """Build what a pod with ``processes`` processes requests."""
    return Resources(
        cpu=format_cores(pod.cpu * processes),
        mem=pod.mem,  # of all processes together
        gpu=str(pod.gpus * processes) if pod.gpus else None,
        ephemeral_storage=pod.ephemeral_storage,
    )
