"""A machine of a Ray cluster that goes in the middle of a stage."""

from __future__ import annotations

import pytest
from flyte_cases import (
    MAX_SECONDS,
    WORKFLOW,
    Flyte,
    ListPods,
    MakeRecipe,
    Record,
    find_child_runs,
)
from flyte_recipes import ON_RAY, build_promotable_changes
from kubernetes import client
from kubernetes.client import CoreV1Api
from mlflow import MlflowClient

TASK = "train_online_ray"
LABEL = "1.1 online"
STEPS = 6
DELETED_AFTER = 2
"""Steps, each with a checkpoint."""


def test_a_stage_survives_a_deleted_machine_of_its_ray_cluster(
    flyte: Flyte,
    version: str,
    make_recipe: MakeRecipe,
    list_pods: ListPods,
    pods: CoreV1Api,
    record_property: Record,
) -> None:
    """The pod of a Ray worker is deleted: the stage trains every step once and succeeds."""
    groups = client.ApisApi(pods.api_client).get_api_versions().groups
    if "ray.io" not in {group.name for group in groups}:
        pytest.skip("KubeRay is not there")
    stage = ON_RAY | {"steps": STEPS, "checkpoints": {"every": 1}}
    recipe = make_recipe("lost", **build_promotable_changes(stage))
    execution = flyte.start(WORKFLOW, version, recipe, "lost")
    store = MlflowClient(flyte.mlflow, flyte.mlflow)

    def list_steps() -> list[int]:
        if not execution.attempts_of("start_run"):
            return []
        return sorted(
            metric.step
            for run in find_child_runs(flyte, execution)
            if run.info.run_name == LABEL
            for metric in store.get_metric_history(run.info.run_id, "loss")
        )

    execution.wait_until(
        lambda: len(list_steps()) >= DELETED_AFTER, f"{DELETED_AFTER} steps of {TASK}", MAX_SECONDS
    )
    (worker,) = [
        pod
        for pod in list_pods(execution, TASK)
        if pod.metadata.labels.get("ray.io/node-type") == "worker" and pod.status.phase == "Running"
    ]
    pods.delete_namespaced_pod(worker.metadata.name, worker.metadata.namespace)
    execution.wait_until(
        lambda: execution.attempts_of(TASK)[-1].phase == "SUCCEEDED",
        f"the end of {TASK}",
        MAX_SECONDS,
    )
    attempts = execution.attempts_of(TASK)
    steps = list_steps()
    execution.abort("all was seen")
    assert steps == list(range(steps[0], steps[0] + STEPS))
    record_property(
        "seen", f"{worker.metadata.name} deleted; {len(attempts)} attempts; every step once"
    )
