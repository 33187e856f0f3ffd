"""A whole run, undisturbed: submitted, online and offline stages, a person's yes, a champion."""

from __future__ import annotations

import re
import time
import urllib.request
from statistics import median
from typing import Any, NamedTuple

import pytest
import yaml
from flyte_cases import (
    DRY_RUN,
    MAX_SECONDS,
    WORKFLOW,
    Flyte,
    ListPods,
    MakeRecipe,
    Record,
    Register,
    find_child_runs,
    find_parent_run,
    wait_for_line,
)
from flyte_engine import Execution, list_deck_links
from flyte_pods import read_log
from flyte_recipes import OFFLINE, ONLINE, build_promotable_changes, with_approval
from flyteidl.core.identifier_pb2 import WorkflowExecutionIdentifier
from kubernetes.client import CoreV1Api, V1Container, V1ObjectMeta, V1Pod, V1PodSpec
from kubernetes.utils import parse_quantity
from mlflow import MlflowClient
from mlflow.entities import Run

from ebbflow.recipe import Recipe
from tasks.request_approval import GATE

STARTED = "execution "
"""The beginning of the line in which ``ebbflow submit`` names the execution."""
MAX_IMPORT_SECONDS = 1.5
MEASURE_IMPORTS = """
import subprocess, sys
code = '''
import os, time
import flytekit.bin.entrypoint
flytekit = time.process_time()
import tasks.start_run
print(os.environ.get("EBBFLOW_GIT_COMMIT") or "unknown", flytekit, time.process_time())
'''
# The second process finds the files in memory, as most pods of a node do.
for _ in range(2):
    subprocess.run([sys.executable, "-c", code], check=True)
"""
"""Prints the commit of the image, and seconds of CPU time since a process began: after importing
Flyte's entry point, and after importing a light task.
"""
IMPORT = re.compile(r"^import time: +(\d+) \| +\d+ \| +(\S+)$", re.MULTILINE)
"""A line of Python's own profile of imports: microseconds of a module without those that it
imports, and its name.
"""
LAST_OF_PLAN_RUN = "tasks.resources"
"""The last that the task of ``dry_run`` imports at the top of its file; Python's profile has no
line for that file itself, which Flyte imports by its name.
"""
MAX_CLOSURE_BYTES = 256 * 1024
LIGHT = ("start_run", "prepare_prompts", "choose_candidate", "decide_promotion", "write_report")
"""Tasks in pods of the kind ``light``."""


class SubmittedRun(NamedTuple):
    """A run that ``ebbflow submit --wait`` has started and followed to its end."""

    execution: Execution
    lines: list[str]
    """What the command printed."""
    status: int
    """Its exit status."""
    decks_before_answer: list[str]
    """Addresses of the report's deck, while the gate waited."""


@pytest.fixture(scope="module")
def recipe(make_recipe: MakeRecipe) -> Recipe:
    return make_recipe("run", **with_approval(build_promotable_changes(ONLINE, OFFLINE)))


@pytest.fixture(scope="module")
def submitted_run(
    flyte: Flyte, version: str, recipe: Recipe, tmp_path_factory: pytest.TempPathFactory
) -> SubmittedRun:
    file = tmp_path_factory.mktemp("submitted") / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_unset=True)))
    log = file.with_name("log")
    options = [*flyte.place, "--version", version, "--wait"]
    with log.open("w") as output:
        command = flyte.start_ebbflow(output, "submit", str(file), *options)
    try:
        name = wait_for_line(log, STARTED, command).removeprefix(STARTED).split()[0]
        execution = Execution(
            flyte.remote,
            WorkflowExecutionIdentifier(project=flyte.project, domain=flyte.domain, name=name),
        )
        flyte.started.append(execution)
        execution.wait_until(lambda: execution.is_asked(GATE), "the gate", MAX_SECONDS)
        decks = list_deck_links(execution, execution.attempts_of("write_report")[-1].node)
        execution.answer(GATE, True)
        execution.wait_for_end(MAX_SECONDS)
        status = command.wait(timeout=120)
    finally:
        command.kill()
    return SubmittedRun(execution, log.read_text().splitlines(), status, decks)


@pytest.fixture(scope="module")
def execution(submitted_run: SubmittedRun) -> Execution:
    return submitted_run.execution


@pytest.fixture(scope="module")
def parent(flyte: Flyte, execution: Execution) -> Run:
    return find_parent_run(flyte, execution)


def test_submit_follows_a_run_to_its_end(
    submitted_run: SubmittedRun, record_property: Record
) -> None:
    """`ebbflow submit --wait` prints the console's address, the phases and the outcome."""
    name = submitted_run.execution.name
    assert submitted_run.status == 0
    assert any("/console/" in line and name in line for line in submitted_run.lines)
    assert "SUCCEEDED" in submitted_run.lines
    (outcome,) = [line for line in submitted_run.lines if line.endswith(": promoted to champion")]
    record_property("seen", f"exit status 0; {outcome}")


def test_the_run_ends_with_a_champion(
    flyte: Flyte, execution: Execution, parent: Run, record_property: Record
) -> None:
    """A run, online and offline, ends with a promoted champion after a person's yes through the
    signal API."""
    store = MlflowClient(flyte.mlflow, flyte.mlflow)
    model = store.get_registered_model(f"{flyte.run}-run")
    assert model.aliases["champion"] == "1"
    tags = store.get_model_version(model.name, "1").tags
    assert tags["ebbflow.approved_in"] == execution.name
    assert parent.info.status == "FINISHED"
    attempts = execution.list_attempts()
    assert {attempt.number for attempt in attempts} == {0}
    record_property(
        "seen", f"{len(attempts)} tasks, none retried; ebbflow.approved_in, MLflow FINISHED"
    )


def test_the_question_begins_with_the_decision(
    flyte: Flyte, submitted_run: SubmittedRun, execution: Execution, record_property: Record
) -> None:
    """The approval's question begins with the decision, and the report's deck opens before the
    answer."""
    runs = find_child_runs(flyte, execution)
    (question,) = [run.data.params["question"] for run in runs if "question" in run.data.params]
    folder = f"tiny-{find_parent_run(flyte, execution).info.run_id[:8]}"
    assert question.startswith(f"{flyte.run}-run version 1 as champion")
    assert question.endswith(f"; Flyte Deck of write_report, run {folder})")
    assert submitted_run.decks_before_answer
    record_property("seen", question)


def test_messages_are_far_below_the_limits(
    flyte: Flyte, version: str, record_property: Record
) -> None:
    """What the engine reads of `post_train` is far below its 2 MB."""
    size = flyte.read_workflow_size(WORKFLOW, version)
    assert size < MAX_CLOSURE_BYTES
    record_property("seen", f"{size} bytes with all interfaces")


def test_shards_have_pods_of_their_own(
    execution: Execution, list_pods: ListPods, record_property: Record
) -> None:
    """Mapped shards have a pod each."""
    counts = {
        task: len(list_pods(execution, task)) for task in ("generate_rollouts", "score_rollouts")
    }
    assert counts == dict.fromkeys(counts, OFFLINE["shards"])
    record_property("seen", ", ".join(f"{task}: {count} pods" for task, count in counts.items()))


def test_pods_have_the_service_account(
    execution: Execution, list_pods: ListPods, deployment: dict[str, Any], record_property: Record
) -> None:
    """Pods have labels and the service account of the deployment."""
    if "service_account" not in deployment:
        pytest.skip("the deployment names no service_account")
    pods = list_pods(execution, "")
    accounts = {pod.spec.service_account_name for pod in pods}
    assert accounts == {deployment["service_account"]}
    expected = set(deployment.get("labels", {}).items())
    assert all(expected <= set(pod.metadata.labels.items()) for pod in pods)
    record_property("seen", f"{len(pods)} pods")


def test_pods_ask_for_fractions_of_a_core(
    execution: Execution, list_pods: ListPods, deployment: dict[str, Any], record_property: Record
) -> None:
    """Pods ask for the cores of the deployment, whole or not."""
    cores = {
        pod.spec.containers[0].resources.requests["cpu"]
        for task in LIGHT
        for pod in list_pods(execution, task)
    }
    assert {parse_quantity(one) for one in cores} == {parse_quantity(deployment["light"]["cpu"])}
    record_property("seen", f"light pods: {', '.join(cores)}")


def test_light_pods_are_short(
    execution: Execution, list_pods: ListPods, record_property: Record
) -> None:
    """The seconds of the container of a light pod, imports and MLflow included."""
    seconds = []
    for task in LIGHT:
        for pod in list_pods(execution, task):
            ended = pod.status.container_statuses[0].state.terminated
            seconds.append((ended.finished_at - ended.started_at).total_seconds())
    assert len(seconds) >= len(LIGHT)
    record_property("seen", f"median {median(seconds):.0f} s, {len(seconds)} pods")


def test_a_light_pod_imports_in_little_time(
    flyte: Flyte, pods: CoreV1Api, record_property: Record
) -> None:
    """What a light pod imports before its task costs at most 1.5 s of a core."""
    namespace = f"{flyte.project}-{flyte.domain}"
    name = f"{flyte.run}-imports"
    container = V1Container(
        name="primary", image=flyte.image, command=["python3", "-c", MEASURE_IMPORTS]
    )
    spec = V1PodSpec(containers=[container], restart_policy="Never")
    pods.create_namespaced_pod(namespace, V1Pod(metadata=V1ObjectMeta(name=name), spec=spec))
    try:
        deadline = time.monotonic() + MAX_SECONDS
        phase = "Pending"
        while phase in ("Pending", "Running"):
            assert time.monotonic() < deadline
            time.sleep(1)
            phase = pods.read_namespaced_pod(name, namespace).status.phase
        assert phase == "Succeeded"
        printed = pods.read_namespaced_pod_log(name, namespace)
    finally:
        pods.delete_namespaced_pod(name, namespace)
    commit, flytekit_seconds, seconds = printed.split()[-3:]
    record_property("version of commit of the image", commit)
    assert float(seconds) <= MAX_IMPORT_SECONDS
    record_property(
        "seen",
        f"{float(seconds):.2f} s of CPU time, {float(flytekit_seconds):.2f} s of them flytekit's",
    )


def test_the_log_of_a_light_pod_names_its_imports(
    flyte: Flyte,
    register: Register,
    deployment: dict[str, Any],
    make_recipe: MakeRecipe,
    list_pods: ListPods,
    pods: CoreV1Api,
    record_property: Record,
) -> None:
    """The imports of a light pod before its task, by the pod's own log: nothing with tensors."""
    version = register(env=deployment["env"] | {"PYTHONPROFILEIMPORTTIME": "1"})
    execution = flyte.start(DRY_RUN, version, make_recipe("imports"), "imports")
    execution.wait_for_end(MAX_SECONDS)
    (pod,) = list_pods(execution, "plan_run")
    imports = IMPORT.findall(read_log(pods, pod))
    names = [name for _, name in imports]
    before_task = imports[: names.index(LAST_OF_PLAN_RUN) + 1]
    assert names.index("flytekit") < len(before_task)
    assert not {"torch", "mlflow", "diffusers", "ray"} & {name for _, name in before_task}
    seconds = sum(int(microseconds) for microseconds, _ in before_task) / 1e6
    record_property(
        "seen", f"{seconds:.2f} s of the clock for {len(before_task)} modules, other pods beside it"
    )


def test_the_report_is_a_deck(execution: Execution, record_property: Record) -> None:
    """The report opens as a Flyte deck."""
    node = execution.attempts_of("write_report")[-1].node
    (link, *_) = list_deck_links(execution, node)
    with urllib.request.urlopen(link, timeout=60) as response:
        page = response.read()
    assert b"<html" in page.lower()
    assert b"before" in page
    record_property("seen", f"{len(page) / 1024:.0f} KiB")


def test_the_same_recipe_hits_the_cache(
    flyte: Flyte, version: str, execution: Execution, recipe: Recipe, record_property: Record
) -> None:
    """A second run takes the base model from the cache."""
    again = flyte.start(WORKFLOW, version, recipe, "cached")
    attempt = again.wait_for_task("train_base_model", ("SUCCEEDED",), MAX_SECONDS)
    assert attempt.cache == "CACHE_HIT"
    again.abort("the cache was seen")
    record_property("seen", f"train_base_model: {attempt.cache}")
