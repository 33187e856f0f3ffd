"""Jobs of KubeRay and of the training operator, in whose pods an edited clone runs."""

from __future__ import annotations

import json
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError

import pytest
import yaml
from flyte_cases import (
    EDITED,
    MAX_SECONDS,
    Flyte,
    ListPods,
    MakeRecipe,
    Record,
    find_child_runs,
    find_parent_run,
)
from flyte_engine import Execution
from flyte_pods import PodKiller, delete_pods, read_log
from flyte_recipes import EVERY_STEP, OFFLINE, ON_RAY, ONLINE, build_promotable_changes
from flyteidl.core.identifier_pb2 import WorkflowExecutionIdentifier
from kubernetes import client
from kubernetes.client import ApiException, CoreV1Api, V1Pod
from kubernetes.utils import parse_quantity
from mlflow import MlflowClient

NODES = 2
"""Of a PyTorchJob."""
RELEASE_SECONDS = 60
"""Within which the pods of a Ray cluster end: Flyte asks every few seconds, and pods have a grace
period of their own.
"""
STEPS = 6
"""Of the stage in whose middle a node of its PyTorchJob is deleted."""
COLOCATED = ONLINE | EVERY_STEP | {"placement": "colocated", "steps": STEPS}
LABELS = {"train_online_ray": "1.1 online", "train_online_colocated": "1.2 online"}
"""Of the stages, by the tasks that train them."""
KILLED_AT = {"train_online_colocated": "checkpoint of step 2 saved"}
DOWNLOADER_NOTE = "'message': 'Unclosed client session'"
"""What flytekit's ``pyflyte-fast-execute``, which downloads the upload and then runs the task in a
process of its own, logs as an error at its end. No code of ours runs in it.
"""
STARTED = f"starting 1 processes for train_offline, on one of {NODES} nodes"
"""What each worker of the offline stage logs first."""
METRIC = "jpeg_incompressibility"


class ObservedRun(NamedTuple):
    """An execution of an edited clone, and what was seen of its pods while they ran."""

    execution: Execution
    ray_pods: dict[str, V1Pod]
    """The head and the workers of the Ray cluster, by their names. KubeRay replaces a head that
    does not answer its probes, as on a busy node.
    """
    ray_job: dict[str, Any]
    """The object that Flyte made for KubeRay."""
    release_seconds: float
    """From the end of the Ray stage to the end of its pods, as far as these tests looked."""
    killer: PodKiller
    offline_logs: list[str]
    """What each pod of the offline stage has printed, before the execution was aborted."""


def _has_resource(pods: CoreV1Api, group: str) -> bool:
    groups = client.ApisApi(pods.api_client).get_api_versions().groups
    return group in {listed.name for listed in groups}


@pytest.fixture(scope="module")
def edited_run(
    flyte: Flyte,
    clone: Path,
    deployment: dict[str, Any],
    make_recipe: MakeRecipe,
    pods: CoreV1Api,
) -> Execution:
    """The edited clone, submitted with ``pyflyte run --remote``: a stage on Ray, and two in
    PyTorchJobs.
    """
    for group, operator in (("ray.io", "KubeRay"), ("kubeflow.org", "the training operator")):
        if not _has_resource(pods, group):
            pytest.skip(f"{operator} is not there")
    recipe = make_recipe("edited", **build_promotable_changes(ON_RAY, COLOCATED, OFFLINE))
    path = clone / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_unset=True)))
    name = f"{flyte.run}-edited"
    options = ["--remote", "--copy", "all", "--image", flyte.image, *flyte.place, "--name", name]
    workflow = ["workflows/post_training.py", "post_train", "--recipe", str(path)]
    nodes = {"train_nodes": NODES, "train_processes": 1}
    variables = {"PYTHONPATH": str(clone), "EBBFLOW_DEPLOYMENT": json.dumps(deployment | nodes)}
    flyte.pyflyte("run", *options, *workflow, folder=clone, **variables)
    identifier = WorkflowExecutionIdentifier(project=flyte.project, domain=flyte.domain, name=name)
    execution = Execution(flyte.remote, identifier)
    flyte.started.append(execution)
    return execution


@pytest.fixture(scope="module")
def observed_run(
    flyte: Flyte, edited_run: Execution, list_pods: ListPods, pods: CoreV1Api
) -> ObservedRun:
    def list_cluster() -> dict[str, V1Pod]:
        return {
            pod.metadata.name: pod
            for pod in list_pods(edited_run, "train_online_ray")
            if "ray.io/node-type" in pod.metadata.labels and pod.status.phase == "Running"
        }

    edited_run.wait_until(lambda: len(list_cluster()) == 2, "a head and a worker", MAX_SECONDS)
    cluster = list_cluster()
    namespace = f"{flyte.project}-{flyte.domain}"
    jobs = client.CustomObjectsApi(pods.api_client).list_namespaced_custom_object(
        "ray.io", "v1", namespace, "rayjobs", label_selector=f"execution-id={edited_run.name}"
    )
    with delete_pods(edited_run, KILLED_AT, list_pods, pods) as killer:

        def is_trained() -> bool:
            cluster.update(list_cluster())
            attempts = edited_run.attempts_of("train_online_ray")
            return any(attempt.phase == "SUCCEEDED" for attempt in attempts)

        edited_run.wait_until(is_trained, "the end of the Ray stage", MAX_SECONDS)
        ended = time.monotonic()
        edited_run.wait_until(lambda: not list_cluster(), "the end of the Ray cluster", MAX_SECONDS)
        seconds = time.monotonic() - ended
        edited_run.wait_for_task("train_offline", ("SUCCEEDED",), MAX_SECONDS)
    # Flyte deletes the pods of an aborted execution.
    logs = [read_log(pods, pod) for pod in list_pods(edited_run, "train_offline")]
    edited_run.abort("all was seen")
    return ObservedRun(edited_run, cluster, jobs["items"][0], seconds, killer, logs)


def test_an_edited_clone_runs_in_every_pod(
    flyte: Flyte, observed_run: ObservedRun, record_property: Record
) -> None:
    """`pyflyte run --remote --copy all` runs an edited reward in every pod, without a new image."""
    rewards = {
        f"{run.info.run_name}: {name}": value
        for run in find_child_runs(flyte, observed_run.execution)
        for name, value in run.data.metrics.items()
        if name in (f"scores/held_out/{METRIC}", f"scores/validation/{METRIC}", "reward/mean")
    }
    # Evaluations have pods of their own; one stage is a RayJob, and one a PyTorchJob.
    assert {f"{label}: reward/mean" for label in LABELS.values()} <= set(rewards)
    assert f"before evaluation: scores/held_out/{METRIC}" in rewards
    assert min(rewards.values()) > EDITED
    record_property(
        "seen", f"{EDITED} added: " + ", ".join(f"{k} {v:.2f}" for k, v in rewards.items())
    )


def test_a_stage_trains_on_a_ray_cluster(
    observed_run: ObservedRun, record_property: Record
) -> None:
    """A RayJob trains a stage with `placement: ray`."""
    for pod in observed_run.ray_pods.values():
        release = (pod.metadata.annotations or {}).get("ray.io/kuberay-version")
        if release:
            record_property("version of KubeRay", release)
    attempts = observed_run.execution.attempts_of("train_online_ray")
    assert [attempt.phase for attempt in attempts] == ["SUCCEEDED"]
    record_property("seen", "SUCCEEDED in one attempt")


def test_a_ray_cluster_is_released_at_once(
    observed_run: ObservedRun, record_property: Record
) -> None:
    """A Ray cluster that is done gives its machines back at once."""
    assert observed_run.release_seconds < RELEASE_SECONDS
    record_property("seen", f"no pod runs after {observed_run.release_seconds:.0f} s")


def test_pods_of_a_ray_cluster_have_the_service_account(
    observed_run: ObservedRun, deployment: dict[str, Any], record_property: Record
) -> None:
    """The head and the workers of a RayJob have the deployment's service account."""
    accounts = {pod.spec.service_account_name for pod in observed_run.ray_pods.values()}
    if "service_account" not in deployment:
        pytest.skip("the deployment names no service_account")
    assert accounts == {deployment["service_account"]}
    record_property("seen", f"{accounts} in {len(observed_run.ray_pods)} pods")


def test_pods_of_a_ray_cluster_ask_for_fractions_of_a_core(
    observed_run: ObservedRun, deployment: dict[str, Any], record_property: Record
) -> None:
    """The head and the workers of a RayJob ask for the cores of the deployment, whole or not."""
    cluster = deployment["ray_cluster"]
    cores = {}
    for pod in observed_run.ray_pods.values():
        kind = pod.metadata.labels["ray.io/node-type"]
        cores[kind] = pod.spec.containers[0].resources.requests["cpu"]
    assert parse_quantity(cores["head"]) == parse_quantity(str(cluster["cpu"]))
    assert parse_quantity(cores["worker"]) == parse_quantity(str(cluster["workers"][0]["cpu"]))
    record_property("seen", ", ".join(f"{kind} {value}" for kind, value in cores.items()))


def test_the_logs_of_a_ray_cluster_are_kept(
    flyte: Flyte, observed_run: ObservedRun, record_property: Record
) -> None:
    """The logs of Ray's machines are in the run's folder."""
    run = find_parent_run(flyte, observed_run.execution)
    folder = f"{flyte.output}/{flyte.run}/tiny-{run.info.run_id[:8]}/logs/1.1-online"
    sizes = []
    for name in observed_run.ray_pods:
        address = f"{folder}/attempt-0-{name}.tar.gz"
        link = flyte.remote.client.get_download_signed_url(address).signed_url
        # A machine that KubeRay has replaced has left none.
        with suppress(HTTPError), urllib.request.urlopen(link, timeout=60) as response:
            sizes.append(len(response.read()))
    assert len(sizes) >= 2
    assert min(sizes) > 1000
    record_property("seen", f"{', '.join(f'{size / 1024:.0f} KiB' for size in sizes)}")


def test_a_ray_job_with_a_variable_twice_is_refused(
    observed_run: ObservedRun, pods: CoreV1Api, record_property: Record
) -> None:
    """A RayJob with a variable twice, the platform's and the deployment's, is refused as the docs
    say."""
    job = observed_run.ray_job
    namespace = job["metadata"]["namespace"]
    body = {key: job[key] for key in ("apiVersion", "kind", "spec")}
    body["metadata"] = {"name": f"{observed_run.execution.name}-twice", "namespace": namespace}
    head = body["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    head["env"].append(head["env"][0])
    with pytest.raises(ApiException) as raised:
        client.CustomObjectsApi(pods.api_client).create_namespaced_custom_object(
            "ray.io", "v1", namespace, "rayjobs", body, dry_run="All"
        )
    assert "Duplicate value" in raised.value.body
    record_property("seen", json.loads(raised.value.body)["message"][:160])


def test_a_colocated_stage_trains_on_two_nodes(
    flyte: Flyte, observed_run: ObservedRun, record_property: Record
) -> None:
    """A PyTorchJob of two nodes runs an online stage with `placement: colocated`; a node is
    deleted, and the stage goes on after its last checkpoint."""
    task = "train_online_colocated"
    assert task in observed_run.killer.deleted
    attempts = observed_run.execution.attempts_of(task)
    assert [attempt.phase for attempt in attempts][-1] == "SUCCEEDED"
    assert len(attempts) == 2
    lines = observed_run.killer.find_resumptions(task)
    assert lines
    store = MlflowClient(flyte.mlflow, flyte.mlflow)
    (child,) = [
        run
        for run in find_child_runs(flyte, observed_run.execution)
        if run.info.run_name == LABELS[task]
    ]
    steps = sorted(metric.step for metric in store.get_metric_history(child.info.run_id, "loss"))
    first = steps[0]
    assert steps == list(range(first, first + STEPS))
    record_property(
        "seen", f"{observed_run.killer.deleted[task]} deleted; {lines[0]}; every step once"
    )


def test_an_offline_stage_trains_on_two_nodes(
    observed_run: ObservedRun, record_property: Record
) -> None:
    """A PyTorchJob trains an offline stage on two nodes."""
    assert len(observed_run.offline_logs) == NODES
    attempts = observed_run.execution.attempts_of("train_offline")
    assert [attempt.phase for attempt in attempts] == ["SUCCEEDED"]
    record_property("seen", f"{NODES} pods, SUCCEEDED")


def test_workers_of_a_good_run_log_no_error(
    observed_run: ObservedRun, record_property: Record
) -> None:
    """No worker of a PyTorchJob that succeeds logs an error."""
    lines = [
        line
        for log in observed_run.offline_logs
        for line in log.splitlines()
        if DOWNLOADER_NOTE not in line
    ]
    # The log of every worker was read, from its beginning.
    assert [STARTED in log for log in observed_run.offline_logs] == [True] * NODES
    assert [line for line in lines if "ERROR" in line or "Traceback" in line] == []
    record_property("seen", f"{len(lines)} lines, without those of Flyte's downloader")
