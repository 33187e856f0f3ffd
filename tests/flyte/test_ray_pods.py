"""Pods of a Ray cluster that are deleted in the middle of a stage."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

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
from flyte_engine import Attempt, Execution
from flyte_pods import find_resumptions, read_log
from flyte_recipes import EVERY_STEP, ON_RAY, build_promotable_changes
from kubernetes import client
from kubernetes.client import CoreV1Api, V1Pod
from mlflow import MlflowClient

TASK = "train_online_ray"
NODE_TYPE = "ray.io/node-type"
"""The label that KubeRay gives to the head and the workers; the pod that submits the job has none,
and prints what the stage logs.
"""
KINDS = ("worker", "head")
"""Which pod is deleted in each of the stages."""
STEPS = 20
"""Enough that a stage still runs when its pod is deleted after its second one."""
SAVED = "checkpoint of step 2 saved"
"""What a stage logs before a pod of it is deleted."""


@dataclass
class BrokenStage:
    """A Ray stage one of whose pods was deleted."""

    node: str
    """The node of the execution that trains it."""
    deleted: str
    """The name of the deleted pod."""
    attempts: list[Attempt] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)
    """What each pod that submits a job of the stage has printed, by its unique id."""


@pytest.fixture(scope="module")
def ray_run(flyte: Flyte, version: str, make_recipe: MakeRecipe, pods: CoreV1Api) -> Execution:
    """An execution with a Ray stage for each kind of pod."""
    groups = client.ApisApi(pods.api_client).get_api_versions().groups
    if "ray.io" not in {group.name for group in groups}:
        pytest.skip("KubeRay is not there")
    stage = ON_RAY | EVERY_STEP | {"steps": STEPS}
    recipe = make_recipe("ray", **build_promotable_changes(*[stage] * len(KINDS)))
    return flyte.start(WORKFLOW, version, recipe, "ray")


@pytest.fixture(scope="module")
def broken_stages(
    ray_run: Execution, list_pods: ListPods, pods: CoreV1Api
) -> dict[str, BrokenStage]:
    """The stages, by the kind of the pod that was deleted."""
    stages: dict[str, BrokenStage] = {}
    for kind in KINDS:
        earlier_nodes = {stage.node for stage in stages.values()}
        stages[kind] = _break_stage(ray_run, kind, earlier_nodes, list_pods, pods)
    ray_run.abort("all was seen")
    return stages


def _break_stage(
    execution: Execution,
    kind: str,
    earlier_nodes: set[str],
    list_pods: ListPods,
    pods: CoreV1Api,
) -> BrokenStage:
    """Delete a pod of the next Ray stage in its middle, and follow the stage to its end."""
    seen: list[V1Pod] = []

    def has_saved() -> bool:
        seen[:] = [
            pod
            for pod in list_pods(execution, TASK)
            if _name_node(execution, pod) not in earlier_nodes
        ]
        return any(SAVED in log for log in _read_job_logs(pods, seen).values())

    execution.wait_until(has_saved, f"a checkpoint, to delete a {kind}", MAX_SECONDS)
    deleted = next(pod.metadata for pod in seen if pod.metadata.labels.get(NODE_TYPE) == kind)
    pods.delete_namespaced_pod(deleted.name, deleted.namespace)
    stage = BrokenStage(_name_node(execution, seen[0]), deleted.name)

    def has_ended() -> bool:
        # The next stage may begin before the end of this one is seen.
        of_stage = [
            pod for pod in list_pods(execution, TASK) if _name_node(execution, pod) == stage.node
        ]
        stage.logs |= _read_job_logs(pods, of_stage)
        stage.attempts = [
            attempt for attempt in execution.attempts_of(TASK) if attempt.node == stage.node
        ]
        return any(attempt.phase == "SUCCEEDED" for attempt in stage.attempts)

    execution.wait_until(has_ended, f"the end of the stage that lost a {kind}", MAX_SECONDS)
    return stage


def _read_job_logs(api: CoreV1Api, pods: list[V1Pod]) -> dict[str, str]:
    """Read what the pods that submit jobs have printed, by their unique ids."""
    logs = {
        pod.metadata.uid: read_log(api, pod) for pod in pods if NODE_TYPE not in pod.metadata.labels
    }
    return {uid: log for uid, log in logs.items() if log}


def _name_node(execution: Execution, pod: V1Pod) -> str:
    """Name the node of an execution that a pod belongs to: ``n6-0-dn2`` of
    ``NAME-n6-0-dn2-0-frnh5-head-x2zff``.
    """
    match = re.match(rf"{execution.name}-(n\d+(?:-\d+-dn\d+)?)-\d+-", pod.metadata.name)
    assert match, pod.metadata.name
    return str(match[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_goes_on_without_a_deleted_ray_pod(
    flyte: Flyte,
    ray_run: Execution,
    broken_stages: dict[str, BrokenStage],
    kind: str,
    record_property: Record,
) -> None:
    """A pod of a Ray cluster is deleted: the stage goes on after its last checkpoint."""
    record_property(
        "case", f"The {kind} of a RayJob is deleted: the stage goes on after its last checkpoint."
    )
    stage = broken_stages[kind]
    # KubeRay replaces a head by itself, and submits the job to it once more.
    assert stage.attempts[-1].phase == "SUCCEEDED"
    lines = [line for log in stage.logs.values() for line in find_resumptions(log)]
    assert lines
    label = f"1.{1 + KINDS.index(kind)} online"
    (child,) = [run for run in find_child_runs(flyte, ray_run) if run.info.run_name == label]
    store = MlflowClient(flyte.mlflow, flyte.mlflow)
    steps = sorted(metric.step for metric in store.get_metric_history(child.info.run_id, "loss"))
    assert steps == list(range(steps[0], steps[0] + STEPS))
    record_property(
        "seen",
        f"{stage.deleted} deleted; {len(stage.attempts)} attempts, {len(stage.logs)} jobs; "
        f"{lines[-1]}; every step once",
    )
