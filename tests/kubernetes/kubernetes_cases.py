"""Pods of a real Kubernetes, made of packaged tasks in the way in which Flyte's engine makes
them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from flyteidl.core.tasks_pb2 import TaskTemplate
from google.protobuf.json_format import MessageToDict
from kubernetes.client import ApiException, CoreV1Api, V1Pod
from kubernetes.watch import Watch

from tests.pipeline.pods import Attempt, PodFailed, primary

IMAGE = "EBBFLOW_KUBERNETES_IMAGE"
ADDRESS = "EBBFLOW_KUBERNETES_ADDRESS"
DATABASE = "EBBFLOW_KUBERNETES_DATABASE"
DELETED_AT = dict.fromkeys(
    ["tasks.train_online.train_online", "tasks.train_offline.train_offline"],
    "checkpoint of step 2 saved",
)
"""Tasks whose first pod is deleted, and at what it prints."""
RUN = "ebbflow-test"
"""The label that the pods of one run of the tests have in common."""
CANNOT_START = {
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
}
"""What a container waits for that does not come."""
MAX_SECONDS = 1800
"""That a pod may take to start, and again to end: a new node may have to start and to pull the
image.
"""


def manifest(attempt: Attempt, name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """The packaged pod template with what Flyte adds to it: arguments, environment, shared memory,
    no restart.
    """
    task = attempt.task
    spec = _whole_numbers(MessageToDict(task.k8s_pod.pod_spec))
    container = primary(task, spec)
    container["args"] = attempt.command
    container["env"] = [{"name": key, "value": value} for key, value in attempt.environment.items()]
    spec["restartPolicy"] = "Never"
    if task.extended_resources.HasField("shared_memory"):
        _share_memory(task, spec, container)
    metadata = {
        "name": name,
        "labels": {**task.k8s_pod.metadata.labels, **labels},
        "annotations": dict(task.k8s_pod.metadata.annotations),
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _whole_numbers(pod: dict[str, Any]) -> dict[str, Any]:
    """All numbers of protobuf's Struct are floats, and Kubernetes takes 300.0 for no number of
    seconds.
    """
    return json.loads(
        json.dumps(pod),
        parse_float=lambda text: int(float(text)) if float(text).is_integer() else float(text),
    )


def _share_memory(task: TaskTemplate, spec: dict[str, Any], container: dict[str, Any]) -> None:
    shared = task.extended_resources.shared_memory
    name = shared.mount_name or "flyte-shared-memory"
    path = shared.mount_path or "/dev/shm"
    volume = {"medium": "Memory"} | ({"sizeLimit": shared.size_limit} if shared.size_limit else {})
    spec.setdefault("volumes", []).append({"name": name, "emptyDir": volume})
    container.setdefault("volumeMounts", []).append({"name": name, "mountPath": path})


@dataclass(frozen=True)
class Kubernetes:
    """Runs attempts as pods of a namespace, one at a time."""

    api: CoreV1Api
    namespace: str
    run: str
    """The name of this run of the tests, with which the names of its pods begin."""
    deleted_at: Mapping[str, str]
    """As ``DELETED_AT``."""
    printed: dict[str, str] = field(default_factory=dict)
    """What every pod so far printed, by the name of its attempt."""

    def run_pod(self, attempt: Attempt) -> str:
        """What the pod printed, once it has ended or was deleted.

        Raises:
            PodFailed: it does not start, or its container ended with an error.
        """
        name = f"{self.run}-{len(self.printed):02}-{_short(attempt.task.id.name)}"
        self.api.create_namespaced_pod(self.namespace, manifest(attempt, name, {RUN: self.run}))
        self._wait(name, attempt, lambda pod: pod.status.phase != "Pending")
        deleted = self._follow(name, attempt)
        # A pod under deletion has ended before it is gone.
        pod = self._wait(
            name, attempt, lambda pod: not deleted and pod.status.phase in ("Succeeded", "Failed")
        )
        said = self.printed[attempt.name]
        if pod is None and not deleted:
            raise PodFailed(
                f"{attempt.name}: pod {name} was deleted, and not by this test:\n{said[-5000:]}"
            )
        if pod and pod.status.phase == "Failed":
            raise PodFailed(f"{attempt.name}: pod {name} failed{_reason(pod)}:\n{said[-5000:]}")
        return said

    def delete_all(self) -> None:
        self.api.delete_collection_namespaced_pod(
            self.namespace, label_selector=f"{RUN}={self.run}"
        )

    def _follow(self, name: str, attempt: Attempt) -> bool:
        """Read what the pod prints until it ends; whether it printed the line at which it is
        deleted.
        """
        first = attempt.environment["FLYTE_ATTEMPT_NUMBER"] == "0"
        trigger = self.deleted_at.get(attempt.task.id.name) if first else None
        deleted = False
        self.printed[attempt.name] = ""
        for line in self._lines(name):
            self.printed[attempt.name] += line
            if trigger and trigger in line and not deleted:
                self.api.delete_namespaced_pod(name, self.namespace)
                deleted = True
        return deleted

    def _lines(self, name: str) -> Iterator[str]:
        with closing(
            self.api.read_namespaced_pod_log(
                name, self.namespace, follow=True, _preload_content=False
            )
        ) as log:
            for line in log:
                yield line.decode(errors="replace")

    def _wait(self, name: str, attempt: Attempt, done: Callable[[V1Pod], bool]) -> V1Pod | None:
        """The pod, once it is as wanted; None when it is gone."""
        deadline = time.monotonic() + MAX_SECONDS
        while time.monotonic() < deadline:
            pod = self._read(name)
            if pod is None or done(pod):
                return pod
            self._watch(name, attempt, done)
        pod = self._read(name)
        raise PodFailed(
            f"{attempt.name}: pod {name} is still {pod and pod.status.phase} after {MAX_SECONDS}"
            f" s{_reason(pod)}"
        )

    def _read(self, name: str) -> V1Pod | None:
        try:
            return self.api.read_namespaced_pod(name, self.namespace)
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    def _watch(self, name: str, attempt: Attempt, done: Callable[[V1Pod], bool]) -> None:
        """Until the pod is as wanted or gone, or half a minute has passed."""
        selected = {
            "namespace": self.namespace,
            "field_selector": f"metadata.name={name}",
            "timeout_seconds": 30,
        }
        for event in Watch().stream(self.api.list_namespaced_pod, **selected):
            pod = event["object"]
            if _waiting(pod) in CANNOT_START:
                raise PodFailed(f"{attempt.name}: pod {name} cannot start{_reason(pod)}")
            if event["type"] == "DELETED" or done(pod):
                return


def _short(task: str) -> str:
    """The name of a task as a part of a pod's name."""
    return re.sub(r"[^a-z0-9]+", "-", task.rpartition(".")[2].lower())[:30].strip("-")


def _waiting(pod: V1Pod) -> str | None:
    states = [status.state for status in pod.status.container_statuses or []]
    return next((state.waiting.reason for state in states if state.waiting), None)


def _reason(pod: V1Pod | None) -> str:
    """What Kubernetes says of a pod that does not start or that failed."""
    if pod is None:
        return ""
    states = [status.state for status in pod.status.container_statuses or []]
    reasons = [f"{pod.status.reason}: {pod.status.message}"] if pod.status.reason else []
    reasons += [
        f"{state.waiting.reason}: {state.waiting.message}" for state in states if state.waiting
    ]
    reasons += [
        f"exit code {state.terminated.exit_code} ({state.terminated.reason})"
        for state in states
        if state.terminated
    ]
    reasons += [
        condition.message
        for condition in pod.status.conditions or []
        if condition.status == "False" and condition.message
    ]
    return f" ({'; '.join(reasons)})" if reasons else ""
