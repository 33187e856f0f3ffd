"""Every pod of the package is one that Kubernetes, KubeRay and the training operator accept."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from flyteidl.core.tasks_pb2 import TaskTemplate
from google.protobuf import json_format

from tests.pipeline.conftest import ROOT, package
from tests.pipeline.engine_limits import build_pods, lint_task, parse_quantity
from tests.pipeline.pods import decoded

EXAMPLE = ROOT / "containers" / "deployment.example.yaml"
RAY = "tasks.train_online_ray.train_online_ray"
OFFLINE = "tasks.train_offline.train_offline"
Tasks = dict[str, TaskTemplate]


@pytest.fixture(scope="module")
def by_default(tmp_path_factory: pytest.TempPathFactory) -> Tasks:
    return decoded(package(tmp_path_factory.mktemp("default"))).tasks


@pytest.fixture(scope="module")
def deployment() -> dict[str, Any]:
    """The example with everything that changes a pod: several nodes, and time limits."""
    settings: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    # The recipes of schedules are files of the registration.
    settings |= {"train_nodes": 2, "schedules": []}
    for kind in ("light", "accelerated", "training_group", "ray_cluster"):
        settings[kind]["max_hours"] = 24
    return settings


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory, deployment: dict[str, Any]) -> Tasks:
    folder = tmp_path_factory.mktemp("gpus")
    return decoded(package(folder, deployment=json.dumps(deployment))).tasks


def test_the_engine_accepts_the_pods_of_a_default_deployment(by_default: Tasks) -> None:
    assert len(by_default) > 30
    assert [finding for task in by_default.values() for finding in lint_task(task)] == []


def test_the_engine_accepts_the_pods_of_the_example(
    on_gpus: Tasks, deployment: dict[str, Any]
) -> None:
    account = deployment["service_account"]
    assert on_gpus[OFFLINE].type == "pytorch"
    assert [finding for task in on_gpus.values() for finding in lint_task(task, account)] == []


def test_a_variable_of_the_platform_that_a_deployment_names_is_found(on_gpus: Tasks) -> None:
    findings = lint_task(on_gpus[RAY], platform_env=["MLFLOW_TRACKING_URI"])
    assert f"{RAY} (head): variable MLFLOW_TRACKING_URI is there 2 times" in findings


def test_the_workers_of_ray_have_resources_of_their_own_and_the_shared_memory(
    on_gpus: Tasks,
) -> None:
    pods = {pod.name: pod for pod in build_pods(on_gpus[RAY])}
    workers = pods[f"{RAY} (workers gpus)"]
    (container,) = workers.spec["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    code, shared_memory = workers.spec["volumes"]
    assert code == {"name": "code", "emptyDir": {}}
    assert shared_memory["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Gi"}
    assert workers.spec["serviceAccountName"] == "ebbflow"
    assert pods[f"{RAY} (submitter)"].spec["serviceAccountName"] == "default"


def _name_variable_twice(spec: dict[str, Any]) -> None:
    spec["containers"][0]["env"] += [{"name": "FLYTE_ATTEMPT_NUMBER", "value": "0"}]


def _request_more_than_the_limit(spec: dict[str, Any]) -> None:
    spec["containers"][0]["resources"]["limits"]["cpu"] = "500m"


def _leave_memory_out(spec: dict[str, Any]) -> None:
    del spec["containers"][0]["resources"]["limits"]["memory"]


def _shorten_deadline(spec: dict[str, Any]) -> None:
    spec["activeDeadlineSeconds"] = 30


@pytest.mark.parametrize(
    ("spoil", "finding"),
    [
        (_name_variable_twice, "variable FLYTE_ATTEMPT_NUMBER is there 2 times"),
        (_request_more_than_the_limit, "requests.cpu = 1 is above limits.cpu = 500m"),
        (_leave_memory_out, "no memory in requests or limits"),
        (_shorten_deadline, "deadline of 30 s within the grace period of 30 s"),
    ],
)
def test_what_is_wrong_with_a_pod_is_found(
    by_default: Tasks, spoil: Callable[[dict[str, Any]], None], finding: str
) -> None:
    task = TaskTemplate.FromString(by_default["tasks.start_run.start_run"].SerializeToString())
    spec = json_format.MessageToDict(task.k8s_pod.pod_spec)
    spoil(spec)
    task.k8s_pod.pod_spec.Clear()
    json_format.ParseDict(spec, task.k8s_pod.pod_spec)
    (found,) = lint_task(task)
    assert found.startswith(f"tasks.start_run.start_run: {finding}")


def test_shared_memory_above_the_memory_is_found(by_default: Tasks) -> None:
    task = TaskTemplate.FromString(by_default[OFFLINE].SerializeToString())
    task.extended_resources.shared_memory.size_limit = "9Gi"
    assert lint_task(task) == [f"{OFFLINE}: shared memory 9Gi is above the memory, 8Gi"]


@pytest.mark.parametrize(
    ("text", "number"), [("2", 2), ("500m", 0.5), ("0.4", 0.4), ("1Ti", 2**40)]
)
def test_quantities_of_kubernetes(text: str, number: float) -> None:
    assert parse_quantity(text) == number
