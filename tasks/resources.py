"""What each kind of task requests from a cluster: the only place that turns the deployment into
Flyte's arguments.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from flytekit import PodTemplate, Resources, Secret
from flytekit.core.resources import pod_spec_from_resources
from flytekit.extras.accelerators import GPUAccelerator
from flytekitplugins.ray import HeadNodeConfig, RayJobConfig, WorkerNodeConfig
from kubernetes.client import V1Container, V1LocalObjectReference, V1PodSpec, V1Toleration

from tasks.deployment import (
    NodesConfig,
    PodConfig,
    RayWorkersConfig,
    SecretConfig,
    build_pod_environment,
    read_deployment,
)
from tasks.elastic import GracefulElastic
from tasks.flyte2 import build_limits, register_elastic_translation
from tasks.images import build_cpu_image

DEPLOYMENT = read_deployment(os.environ)
register_elastic_translation()


def light_resources() -> dict[str, Any]:
    """Bookkeeping: prompts, tracking, advantages, the gate."""
    return _task_arguments(DEPLOYMENT.light)


def downloader_resources() -> dict[str, Any]:
    """Downloads a base model; a secret that the deployment names is in ``HF_TOKEN``."""
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
    """Rewards of an offline stage."""
    return _task_arguments(DEPLOYMENT.scorer)


def accelerated_resources() -> dict[str, Any]:
    """One process that generates or trains, on a GPU if the deployment has one."""
    return _task_arguments(DEPLOYMENT.accelerated)


def training_group_resources() -> dict[str, Any]:
    """``train_processes`` processes on each of ``train_nodes`` nodes, under torch's elastic
    launcher.

    Spawned where there is CUDA, forked elsewhere (``tasks.elastic``). Without restarts inside the
    task, because one would start from the checkpoint of the attempt's beginning. Elastic must not
    add shared memory: it would change the pod template and leave the size open.
    """
    processes = DEPLOYMENT.train_processes
    config = GracefulElastic(
        nnodes=DEPLOYMENT.train_nodes,
        nproc_per_node=processes,
        start_method="spawn",
        monitor_interval=0.1,
        max_restarts=0,
        increase_shared_mem=False,
    )
    return {"task_config": config} | _task_arguments(DEPLOYMENT.training_group, processes)


def ray_cluster_resources() -> dict[str, Any]:
    """The head of a Ray cluster and its workers, of a fixed size: no autoscaler.

    For workers, a pod template replaces the head's resources and its image.
    """
    cluster = DEPLOYMENT.ray_cluster
    config = RayJobConfig(
        head_node_config=HeadNodeConfig(ray_start_params={"num-cpus": "0"}),
        worker_node_config=[_build_ray_workers(group) for group in cluster.workers],
        shutdown_after_job_finishes=True,
        ttl_seconds_after_finished=cluster.keep_seconds,
    )
    return {"task_config": config} | _task_arguments(cluster)


def _build_ray_workers(group: RayWorkersConfig) -> WorkerNodeConfig:
    """A group of workers. Flyte looks at the head's GPUs alone, so that the kind of GPU is selected
    here.
    """
    resources = _build_resources(group)
    pod = pod_spec_from_resources("ray-worker", resources, resources)
    pod.containers[0].image = group.image
    nodes = _build_node_selector(group)
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
    """Which nodes a pod may run on, as Kubernetes' client names it; what is left out is None, which
    no template has.
    """
    return {
        "node_selector": pod.node_selector or None,
        "tolerations": [V1Toleration(**toleration.model_dump()) for toleration in pod.tolerations]
        or None,
        "affinity": pod.affinity,
    }


def _task_arguments(pod: PodConfig, processes: int = 1) -> dict[str, Any]:
    """The arguments of ``@task`` for a pod; cores and GPUs are per process.

    The pod template is new for every task, because Flyte may write into it, and has no resources:
    the task's replace them.
    """
    resources = _build_resources(pod, processes)
    template = V1PodSpec(
        containers=[V1Container(name="primary")],
        termination_grace_period_seconds=pod.grace_period,
        service_account_name=DEPLOYMENT.service_account,
        image_pull_secrets=[
            V1LocalObjectReference(name=name) for name in DEPLOYMENT.image_pull_secrets
        ]
        or None,
        priority_class_name=DEPLOYMENT.priority_class,
        **_build_node_selector(pod),
    )
    return {
        "container_image": pod.image
        or (build_cpu_image(registry) if (registry := DEPLOYMENT.image_registry) else None),
        "requests": resources,
        "limits": build_limits(resources),
        "accelerator": GPUAccelerator(pod.accelerator) if pod.accelerator else None,
        "shared_memory": pod.shared_memory,
        "pod_template": PodTemplate(pod_spec=template, labels=DEPLOYMENT.labels or None),
        "interruptible": pod.interruptible,
        "retries": pod.retries,
        "timeout": timedelta(hours=pod.max_hours or 0),
        "secret_requests": [_build_secret(secret) for secret in DEPLOYMENT.secrets],
        "environment": build_pod_environment(DEPLOYMENT),
    }


def _build_secret(secret: SecretConfig) -> Secret:
    mount = Secret.MountType.FILE if secret.file else Secret.MountType.ENV_VAR
    return Secret(
        group=secret.group, key=secret.key, mount_requirement=mount, env_var=secret.variable
    )


def _build_resources(pod: PodConfig | RayWorkersConfig, processes: int = 1) -> Resources:
    return Resources(
        cpu=str(pod.cpu * processes),
        mem=pod.mem,
        gpu=str(pod.gpus * processes) if pod.gpus else None,
        ephemeral_storage=pod.ephemeral_storage,
    )
