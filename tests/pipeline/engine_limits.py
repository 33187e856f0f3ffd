"""The pods of packaged tasks, as the plugins of Flyte 1.16.8 build them, and what is wrong there.

It follows Flyte's sources: ``flytek8s/pod_helper.go`` (all pods), ``k8s/ray/ray.go`` and
``k8s/kfoperators/pytorch/pytorch.go``. ``lint_task`` returns findings, a sentence each, as a linter
does; none is what Kubernetes, KubeRay and the training operator accept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from flyteidl.core.tasks_pb2 import TaskTemplate
from google.protobuf.json_format import MessageToDict

OPERATORS = ("ray", "pytorch")
"""Types of tasks whose pods an operator makes."""
FLYTE_ENV = (
    "FLYTE_INTERNAL_EXECUTION_WORKFLOW",
    "FLYTE_INTERNAL_EXECUTION_ID",
    "FLYTE_INTERNAL_EXECUTION_PROJECT",
    "FLYTE_INTERNAL_EXECUTION_DOMAIN",
    "FLYTE_ATTEMPT_NUMBER",
    "FLYTE_INTERNAL_TASK_PROJECT",
    "FLYTE_INTERNAL_TASK_DOMAIN",
    "FLYTE_INTERNAL_TASK_NAME",
    "FLYTE_INTERNAL_TASK_VERSION",
    "_F_L_MIN_SIZE_MB",
    "_F_L_MAX_SIZE_MB",
)
RAY_HEAD_ENV = ("MY_POD_IP",)
RAY_WORKER_ENV = (
    "RAY_DISABLE_DOCKER_CPU_WARNING",
    "TYPE",
    "CPU_REQUEST",
    "CPU_LIMITS",
    "MEMORY_REQUESTS",
    "MEMORY_LIMITS",
    "MY_POD_NAME",
    "MY_POD_IP",
)
PYTORCH_ENV = ("_F_WN", "_F_DES")
RAY_SERVICE_ACCOUNT = "default"
"""Of the configuration of Flyte's Ray plugin, which overwrites the one of the task's pod."""
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
MAX_NAME = 63
UNITS = {"m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True)
class BuiltPod:
    """A pod as Kubernetes gets it.

    Example:
        ``BuiltPod("tasks.start_run.start_run", "primary", {"containers": [...]}, {"team": "x"})``
    """

    name: str
    """What findings call it: the task, and for a job of an operator the role in it."""
    primary: str
    """The container in which the task runs."""
    spec: dict[str, Any]
    labels: dict[str, str]


def build_pods(task: TaskTemplate, platform_env: Collection[str] = ()) -> list[BuiltPod]:
    """Build the pods of a task.

    Args:
        platform_env: names of propeller's ``default-env-vars``, which every container gets.
    """
    name = task.id.name
    spec: dict[str, Any] = MessageToDict(task.k8s_pod.pod_spec)
    labels = dict(task.k8s_pod.metadata.labels)
    primary = task.config["primary_container_name"]
    for container in spec["containers"]:
        _append_env(container, [*FLYTE_ENV, *platform_env])
    shared = task.extended_resources.shared_memory
    if task.extended_resources.HasField("shared_memory"):
        medium = {"medium": "Memory", "sizeLimit": shared.size_limit}
        volume = {"name": shared.mount_name, "emptyDir": medium}
        spec["volumes"] = [*spec.get("volumes", []), volume]
        container = _find_container(spec, primary)
        mount = {"name": shared.mount_name, "mountPath": shared.mount_path}
        container["volumeMounts"] = [*container.get("volumeMounts", []), mount]
    if task.type == "pytorch":
        _find_container(spec, primary)["name"] = "pytorch"
        _append_env(_find_container(spec, "pytorch"), PYTORCH_ENV)
        return [BuiltPod(f"{name} (worker)", "pytorch", spec, labels)]
    if task.type == "ray":
        return _build_ray_pods(task, spec, labels, primary)
    return [BuiltPod(name, primary, spec, labels)]


def _build_ray_pods(
    task: TaskTemplate, spec: dict[str, Any], labels: dict[str, str], primary: str
) -> list[BuiltPod]:
    spec["serviceAccountName"] = RAY_SERVICE_ACCOUNT
    cluster = MessageToDict(task.custom)["rayCluster"]
    head = cluster["headGroupSpec"]
    groups = [
        ("head", "ray-head", RAY_HEAD_ENV, head),
        *[
            (f"workers {group['groupName']}", "ray-worker", RAY_WORKER_ENV, group)
            for group in cluster["workerGroupSpec"]
        ],
    ]
    # The submitter runs nothing of the task, and takes the pod as it is.
    pods = [BuiltPod(f"{task.id.name} (submitter)", primary, spec, labels)]
    for role, container_name, variables, group in groups:
        base = deepcopy(spec)
        container = _find_container(base, primary)
        container["name"] = container_name
        container["args"] = []
        _append_env(container, variables)
        template = group.get("k8sPod", {})
        merged = _merge_pod_specs(base, template.get("podSpec", {}))
        group_labels = labels | template.get("metadata", {}).get("labels", {})
        pods.append(BuiltPod(f"{task.id.name} ({role})", container_name, merged, group_labels))
    return pods


def _merge_pod_specs(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """Merge as ``MergeOverlayPodSpecOntoBase``: keys are replaced, lists appended, and containers
    merged by their names.
    """
    merged = _merge(base, {key: overlay[key] for key in overlay if key != "containers"})
    by_name = {container["name"]: container for container in overlay.get("containers", ())}
    merged["containers"] = [
        _merge(container, by_name.get(container["name"], {})) for container in base["containers"]
    ]
    return merged


def _merge(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    merged = deepcopy(base)
    for key, value in overlay.items():
        if isinstance(value, dict):
            merged[key] = _merge(merged.get(key, {}), value)
        elif isinstance(value, list):
            merged[key] = [*merged.get(key, []), *value]
        else:
            merged[key] = value
    return merged


def _append_env(container: dict[str, Any], names: Collection[str]) -> None:
    container["env"] = [*container.get("env", []), *[{"name": name} for name in names]]


def _find_container(spec: dict[str, Any], name: str) -> dict[str, Any]:
    (container,) = [one for one in spec["containers"] if one["name"] == name]
    return container


# --------------------------------------------------------------------------------------- findings


def lint_task(
    task: TaskTemplate, service_account: str | None = None, platform_env: Collection[str] = ()
) -> list[str]:
    """Return what is wrong with the pods of a task; empty: nothing.

    Args:
        service_account: the one that the deployment names.
    """
    findings = []
    for pod in build_pods(task, platform_env):
        findings += [f"{pod.name}: {finding}" for finding in _lint_pod(pod)]
        # The submitter only sends the command line to the head.
        account = pod.spec.get("serviceAccountName")
        if service_account and account != service_account and "(submitter)" not in pod.name:
            findings.append(f"{pod.name}: service account {account!r}, not {service_account!r}")
    has_timeout = task.metadata.timeout.ToSeconds() > 0
    has_deadline = "activeDeadlineSeconds" in MessageToDict(task.k8s_pod.pod_spec)
    if task.type in OPERATORS and has_deadline:
        findings.append(f"{task.id.name}: an operator starts pods again that end by a deadline")
    if task.type not in OPERATORS and has_timeout:
        findings.append(
            f"{task.id.name}: Flyte's timeout counts waiting for a machine, and the nodes of a"
            " dynamic workflow"
        )
    if task.type == "ray":
        groups = MessageToDict(task.custom)["rayCluster"]["workerGroupSpec"]
        findings += [
            f"{task.id.name}: group {name} is there {count} times"
            for name, count in Counter(group["groupName"] for group in groups).items()
            if count > 1
        ]
    return findings


def _lint_pod(pod: BuiltPod) -> Iterator[str]:
    names = [container["name"] for container in pod.spec["containers"]]
    names += [volume["name"] for volume in pod.spec.get("volumes", ())]
    for name in names:
        if not NAME.fullmatch(name) or len(name) > MAX_NAME:
            yield f"{name!r} is no name of a container or volume"
    for key, value in pod.labels.items():
        if not LABEL.fullmatch(value) or len(value) > MAX_NAME:
            yield f"label {key}: {value!r} is no value of a label"
    yield from _find_twice("volume", [volume["name"] for volume in pod.spec.get("volumes", ())])
    for container in pod.spec["containers"]:
        variables = [variable["name"] for variable in container.get("env", ())]
        # Pods take duplicates, and custom resources such as RayJobs do not.
        yield from _find_twice("variable", variables)
        for name in variables:
            if not VARIABLE.fullmatch(name):
                yield f"{name!r} is no name of a variable"
        mounts = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
        yield from _find_twice("mount", mounts)
        yield from _lint_resources(container.get("resources", {}))
    yield from _lint_shared_memory(pod)
    deadline = pod.spec.get("activeDeadlineSeconds")
    grace = pod.spec.get("terminationGracePeriodSeconds", 30)
    if deadline is not None and deadline <= grace:
        yield f"deadline of {deadline:.0f} s within the grace period of {grace:.0f} s"


def _lint_resources(resources: dict[str, dict[str, str]]) -> Iterator[str]:
    requests = resources.get("requests", {})
    limits = resources.get("limits", {})
    for kind in ("cpu", "memory"):
        if kind not in requests or kind not in limits:
            yield f"no {kind} in requests or limits: the pod is evicted first"
    for kind, quantity in requests.items():
        if kind in limits and parse_quantity(quantity) > parse_quantity(limits[kind]):
            yield f"requests.{kind} = {quantity} is above limits.{kind} = {limits[kind]}"


def _lint_shared_memory(pod: BuiltPod) -> Iterator[str]:
    memory = _find_container(pod.spec, pod.primary).get("resources", {}).get("limits", {})
    for volume in pod.spec.get("volumes", ()):
        size = volume.get("emptyDir", {}).get("sizeLimit")
        if size and parse_quantity(size) > parse_quantity(memory.get("memory", "0")):
            yield f"shared memory {size} is above the memory, {memory.get('memory')}"


def _find_twice(kind: str, names: list[str]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{kind} {name} is there {count} times"


def parse_quantity(text: str) -> float:
    """Parse a quantity of Kubernetes, such as 500m or 8Gi."""
    match = re.fullmatch(r"([\d.]+)([a-zA-Z]*)", text)
    if not match:
        raise ValueError(f"{text!r} is no quantity")
    return float(match[1]) * (UNITS[match[2]] if match[2] else 1)
