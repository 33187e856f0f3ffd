"""An abort, what goes on from there, and pods that are deleted meanwhile."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import pytest
from flyte_cases import (
    MAX_SECONDS,
    WORKFLOW,
    Flyte,
    ListPods,
    MakeRecipe,
    Record,
    find_child_runs,
    find_parent_run,
)
from flyte_engine import Execution
from flyte_pods import PodKiller, delete_pods, read_log
from flyte_recipes import EVERY_STEP, OFFLINE, ONLINE, STEPS, build_promotable_changes
from kubernetes.client import CoreV1Api
from mlflow import MlflowClient
from mlflow.entities import Run

DELETED_AT = {
    "generate_rollouts": "",
    "score_rollouts": "",
    "compute_advantages": "",
    "train_online": " saved at ",
    "train_offline": "checkpoint of step 2 saved",
}
"""A task of each kind of pod, and at what its first pod prints that pod is deleted."""
MAPPED = ("generate_rollouts", "score_rollouts")
"""Tasks over shards: their attempts are inside of one task."""
LABELS = {"train_online": "1.1 online", "train_offline": "1.2 offline"}
ABORTED_IN = "train_online"
STARTED = ": 1.1 online started"
"""What its pod logs when its task begins."""
DEFAULT_GRACE = 300
"""Seconds of the grace period of a pod that trains, where the deployment names none."""


class AbortedRun(NamedTuple):
    """An execution that was aborted, and what became of it before it was recovered."""

    execution: Execution
    release_seconds: float
    """From its end to the end of its pods."""
    run: Run
    """Its MLflow run, after ``ebbflow reconcile``."""


@pytest.fixture(scope="module")
def aborted_run(
    flyte: Flyte, version: str, make_recipe: MakeRecipe, list_pods: ListPods, pods: CoreV1Api
) -> AbortedRun:
    stages = (
        ONLINE | EVERY_STEP | {"steps": STEPS},
        OFFLINE | EVERY_STEP | {"epochs": STEPS // 2},
    )
    recipe = make_recipe("aborted", **build_promotable_changes(*stages))
    execution = flyte.start(WORKFLOW, version, recipe, "aborted")
    # A process that still imports has no handler of the signal that ends it.
    execution.wait_until(
        lambda: any(STARTED in read_log(pods, pod) for pod in list_pods(execution, ABORTED_IN)),
        f"{ABORTED_IN} to begin",
        MAX_SECONDS,
    )
    execution.abort("a test")
    execution.wait_for_end(600, "ABORTED")
    ended = time.monotonic()
    while any(pod.status.phase == "Running" for pod in list_pods(execution, "")):
        assert time.monotonic() - ended < MAX_SECONDS
        time.sleep(1)
    seconds = time.monotonic() - ended
    flyte.reconcile()
    return AbortedRun(execution, seconds, find_parent_run(flyte, execution))


@pytest.fixture(scope="module")
def recovered_run(
    flyte: Flyte, aborted_run: AbortedRun, list_pods: ListPods, pods: CoreV1Api
) -> tuple[Execution, PodKiller]:
    """The recovered execution, in which a pod of each kind is deleted."""
    execution = aborted_run.execution.recover(f"{flyte.run}-recovered")
    flyte.started.append(execution)
    with delete_pods(execution, DELETED_AT, list_pods, pods) as killer:
        execution.wait_for_end(MAX_SECONDS)
    return execution, killer


def test_an_abort_releases_the_machine(
    aborted_run: AbortedRun, deployment: dict[str, Any], record_property: Record
) -> None:
    """The pods of an aborted execution are gone before their grace period ends."""
    grace_period = deployment["accelerated"].get("grace_period", DEFAULT_GRACE)
    assert aborted_run.release_seconds < grace_period
    record_property(
        "seen",
        f"no pod runs {aborted_run.release_seconds:.0f} s after the abort, "
        f"grace period {grace_period}",
    )


def test_an_aborted_run_is_killed_in_mlflow(
    aborted_run: AbortedRun, record_property: Record
) -> None:
    """The MLflow run of an aborted execution is KILLED, at the latest by `ebbflow reconcile`."""
    assert aborted_run.run.info.status == "KILLED"
    ended_by = aborted_run.run.data.tags.get(
        "ebbflow.ended_by", "by the stage itself, which has saved"
    )
    record_property("seen", f"KILLED: {ended_by}")


def test_recover_runs_the_unfinished_nodes_alone(
    aborted_run: AbortedRun, recovered_run: tuple[Execution, PodKiller], record_property: Record
) -> None:
    """An aborted execution recovers: only unfinished nodes run again."""
    execution, _ = recovered_run
    ran, finished = (
        {
            attempt.short_task
            for attempt in one.list_attempts()
            if attempt.phase == "SUCCEEDED"
            and attempt.cache != "CACHE_HIT"
            and "-" not in attempt.node
        }
        for one in (execution, aborted_run.execution)
    )
    assert "start_run" in finished
    assert not ran & finished
    assert execution.attempts_of(ABORTED_IN)
    record_property(
        "seen", f"of the workflow's own nodes {len(ran)} ran, {len(finished)} were taken over"
    )


@pytest.mark.parametrize("task", list(DELETED_AT))
def test_a_deleted_pod_gets_another(
    recovered_run: tuple[Execution, PodKiller], task: str, record_property: Record
) -> None:
    """A deleted pod is followed by another attempt, and the run succeeds."""
    execution, killer = recovered_run
    record_property("case", f"The pod of `{task}` is deleted: another goes on.")
    assert task in killer.deleted
    attempts = execution.attempts_of(task)
    assert attempts[-1].phase == "SUCCEEDED"
    if task not in MAPPED:
        assert len(attempts) == 2
    record_property("seen", f"{killer.deleted[task]} deleted; {attempts[0].message.strip()[-120:]}")


@pytest.mark.parametrize("task", list(LABELS))
def test_training_goes_on_after_the_checkpoint(
    flyte: Flyte,
    recovered_run: tuple[Execution, PodKiller],
    task: str,
    record_property: Record,
) -> None:
    """A stage goes on after its last checkpoint, and MLflow has every step once."""
    execution, killer = recovered_run
    record_property("case", f"`{task}` goes on after its last checkpoint.")
    # The recovered training goes on after a checkpoint of the aborted one, too.
    *_, line = killer.find_resumptions(task)
    runs = find_child_runs(flyte, execution)
    (child,) = [run for run in runs if run.info.run_name == LABELS[task]]
    store = MlflowClient(flyte.mlflow, flyte.mlflow)
    steps = sorted(metric.step for metric in store.get_metric_history(child.info.run_id, "loss"))
    assert steps == list(range(STEPS))
    record_property("seen", f"{line}; MLflow has every step once")
