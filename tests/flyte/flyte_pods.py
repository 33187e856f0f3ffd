"""Pods that are deleted while their tasks run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from flyte_cases import ListPods, runs_task
from flyte_engine import Execution
from kubernetes.client import ApiException, CoreV1Api, V1Pod
from urllib3.exceptions import HTTPError

POLL_SECONDS = 1
RESUMPTION = "resuming after step "
"""What a training task logs in a second attempt."""


class PodKiller:
    """Deletes the first pod of each of some tasks of an execution."""

    def __init__(
        self,
        execution: Execution,
        triggers: Mapping[str, str],
        list_pods: ListPods,
        api: CoreV1Api,
    ) -> None:
        """Make a killer of pods.

        Args:
            triggers: what a pod of a task prints before it is deleted; empty: it only has to run.
        """
        self.execution = execution
        self.triggers = triggers
        self.list_pods = list_pods
        self.api = api
        self.deleted: dict[str, str] = {}
        """Names of the deleted pods, by their tasks."""
        self.ended: set[str] = set()
        """Unique ids of pods that have succeeded and been looked at."""
        self.logs: dict[str, dict[str, str]] = {}
        """What each pod of a task with a trigger printed last, by its unique id."""

    def watch(self, stop: threading.Event) -> None:
        """Look at the pods until ``stop`` is set."""
        while not stop.wait(POLL_SECONDS):
            # A busy apiserver that does not answer in time is asked again.
            with suppress(ApiException, HTTPError):
                # One request for all tasks: reading the answer is what costs.
                for pod in self.list_pods(self.execution, ""):
                    for task in self.triggers:
                        if runs_task(pod, task):
                            self._look_at(task, pod)

    def find_resumptions(self, task: str) -> list[str]:
        """Find what the pods of a task have logged about a checkpoint from which they went on."""
        return [line for log in self.logs[task].values() for line in find_resumptions(log)]

    def _look_at(self, task: str, pod: V1Pod) -> None:
        uid = pod.metadata.uid
        # The log of a pod that has ended is read once more.
        if pod.status.phase not in ("Running", "Succeeded") or uid in self.ended:
            return
        trigger = self.triggers[task]
        name = pod.metadata.name
        log = read_log(self.api, pod) if trigger else ""
        if log:
            self.logs.setdefault(task, {})[uid] = log
        if pod.status.phase == "Succeeded":
            self.ended.add(uid)
        if task not in self.deleted and pod.status.phase == "Running" and trigger in log:
            self.api.delete_namespaced_pod(name, pod.metadata.namespace)
            self.deleted[task] = name


@contextmanager
def delete_pods(
    execution: Execution, triggers: Mapping[str, str], list_pods: ListPods, api: CoreV1Api
) -> Iterator[PodKiller]:
    """Delete pods of an execution as long as the body runs."""
    killer = PodKiller(execution, triggers, list_pods, api)
    stop = threading.Event()
    thread = threading.Thread(target=killer.watch, args=(stop,))
    thread.start()
    try:
        yield killer
    finally:
        stop.set()
        thread.join()


def find_resumptions(log: str) -> list[str]:
    """Find in a pod's log from which checkpoints it went on."""
    return [line[line.index(RESUMPTION) :] for line in log.splitlines() if RESUMPTION in line]


def read_log(api: CoreV1Api, pod: V1Pod) -> str:
    """Read what a pod has printed; empty where it is still starting, or gone."""
    # Kubernetes calls both an error.
    with suppress(ApiException):
        return str(api.read_namespaced_pod_log(pod.metadata.name, pod.metadata.namespace))
    return ""
