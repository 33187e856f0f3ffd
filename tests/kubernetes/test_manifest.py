"""What a pod is made of, without a cluster."""

from __future__ import annotations

from flyteidl.core.tasks_pb2 import TaskTemplate
from kubernetes_cases import manifest

from tests.pipeline.pods import Attempt


def _task(shared_memory: bool = False) -> TaskTemplate:
    task = TaskTemplate(config={"primary_container_name": "primary"})
    containers = [
        {"name": "sidecar", "image": "s:1"},
        {"name": "primary", "image": "p:1", "resources": {"limits": {"cpu": "2"}}},
    ]
    task.k8s_pod.pod_spec.update({"containers": containers, "terminationGracePeriodSeconds": 300})
    task.k8s_pod.metadata.labels["team"] = "post-training"
    if shared_memory:
        task.extended_resources.shared_memory.size_limit = "2Gi"
    return task


def _pod(task: TaskTemplate) -> dict[str, object]:
    return manifest(
        Attempt("n0/0 t", "s3://b/n0/0", task, ["run", "it"], {"A": "1"}), "name", {"run": "x"}
    )


def test_the_template_stays_and_the_primary_container_is_filled_in() -> None:
    pod = _pod(_task())
    sidecar, primary = pod["spec"].pop("containers")
    assert sidecar == {"name": "sidecar", "image": "s:1"}
    environment = [{"name": "A", "value": "1"}]
    limits = {"limits": {"cpu": "2"}}
    assert primary == {
        "name": "primary",
        "image": "p:1",
        "resources": limits,
        "args": ["run", "it"],
        "env": environment,
    }
    assert pod["spec"] == {"terminationGracePeriodSeconds": 300, "restartPolicy": "Never"}
    assert isinstance(pod["spec"]["terminationGracePeriodSeconds"], int)
    assert pod["metadata"] == {
        "name": "name",
        "labels": {"team": "post-training", "run": "x"},
        "annotations": {},
    }


def test_shared_memory_is_a_volume_of_memory() -> None:
    pod = _pod(_task(shared_memory=True))
    assert pod["spec"]["volumes"] == [
        {"name": "flyte-shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}
    ]
    sidecar, primary = pod["spec"]["containers"]
    assert primary["volumeMounts"] == [{"name": "flyte-shared-memory", "mountPath": "/dev/shm"}]
    assert "volumeMounts" not in sidecar
