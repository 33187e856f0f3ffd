"""A pod that is deleted as its container starts, and a cache that is overwritten."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import pytest
from flyte_cases import MAX_SECONDS, WORKFLOW, Flyte, ListPods, MakeRecipe, Record, Register
from flyte_engine import Attempt, Execution
from flyte_pods import read_log
from flyte_recipes import ONLINE, build_promotable_changes
from kubernetes.client import ApiException, CoreV1Api, V1Pod

from ebbflow.recipe import Recipe

TASK = "train_base_model"
IMPORT_LINE = "import time:"
"""The beginning of the lines of Python's own profile of imports."""
RELEASE_SECONDS = 30
"""Within which a deleted pod is gone that has nothing to save."""
DEFAULT_GRACE = 300


class DeletedStart(NamedTuple):
    """An execution whose first pod of a task was deleted while it imported."""

    execution: Execution
    log: str
    """What the pod had printed when it was deleted."""
    release_seconds: float
    """From its deletion until it was gone."""
    attempts: list[Attempt]


@pytest.fixture(scope="module")
def recipe(make_recipe: MakeRecipe) -> Recipe:
    """A recipe whose base model no other run has."""
    model = {"training": {"steps": 31, "batch": 16}}
    return make_recipe("start", **build_promotable_changes(ONLINE, model=model))


@pytest.fixture(scope="module")
def deleted_start(
    flyte: Flyte,
    register: Register,
    deployment: dict[str, Any],
    recipe: Recipe,
    list_pods: ListPods,
    pods: CoreV1Api,
) -> DeletedStart:
    # The profile shows what the process does; the status of a pod comes seconds later.
    version = register(env=deployment["env"] | {"PYTHONPROFILEIMPORTTIME": "1"})
    # Its base model may be in the cache of this Flyte from an earlier run of the tests.
    execution = flyte.start(WORKFLOW, version, recipe, "start", overwrite_cache=True)
    execution.wait_until(lambda: list_pods(execution, TASK), f"a pod of {TASK}", MAX_SECONDS)
    (pod,) = list_pods(execution, TASK)
    log = _wait_for_import(pods, pod)
    deleted_at = time.monotonic()
    pods.delete_namespaced_pod(pod.metadata.name, pod.metadata.namespace)
    while _is_there(pods, pod):
        assert time.monotonic() - deleted_at < MAX_SECONDS
        time.sleep(0.2)
    seconds = time.monotonic() - deleted_at
    execution.wait_for_task(TASK, ("SUCCEEDED",), MAX_SECONDS)
    # The node ends, and fills the cache, a moment after its task.
    execution.wait_until(
        lambda: execution.attempts_of(TASK)[-1].cache != "CACHE_DISABLED",
        f"what {TASK} left in the cache",
        MAX_SECONDS,
    )
    attempts = execution.attempts_of(TASK)
    execution.abort("the second attempt was seen")
    return DeletedStart(execution, log, seconds, attempts)


def _wait_for_import(pods: CoreV1Api, pod: V1Pod) -> str:
    """Wait until the first process of a pod imports, and return what it has printed."""
    deadline = time.monotonic() + MAX_SECONDS
    while time.monotonic() < deadline:
        log = read_log(pods, pod)
        if IMPORT_LINE in log:
            return log
        time.sleep(0.1)
    raise AssertionError(f"{pod.metadata.name} has imported nothing in {MAX_SECONDS} s")


def _is_there(pods: CoreV1Api, pod: V1Pod) -> bool:
    """Return whether a pod still holds its machine."""
    try:
        newest = pods.read_namespaced_pod(pod.metadata.name, pod.metadata.namespace)
    except ApiException as error:
        if error.status == 404:
            return False
        raise
    statuses = newest.status.container_statuses or []
    return newest.metadata.uid == pod.metadata.uid and not any(
        status.state.terminated for status in statuses
    )


def test_a_pod_that_imports_obeys_a_deletion(
    deleted_start: DeletedStart, deployment: dict[str, Any], record_property: Record
) -> None:
    """A pod that is deleted in its first imports is gone at once, and not after its grace period;
    another goes on."""
    grace_period = deployment["accelerated"].get("grace_period", DEFAULT_GRACE)
    assert grace_period > RELEASE_SECONDS
    # flytekit prints an empty line before it imports the task.
    lines = filter(None, deleted_start.log.splitlines())
    assert [line for line in lines if not line.startswith(IMPORT_LINE)] == []
    assert deleted_start.release_seconds < RELEASE_SECONDS
    assert len(deleted_start.attempts) == 2
    assert deleted_start.attempts[-1].phase == "SUCCEEDED"
    record_property(
        "seen",
        f"gone after {deleted_start.release_seconds:.1f} s, grace period {grace_period}; "
        f"attempt 2 {deleted_start.attempts[-1].phase}",
    )


def test_a_cache_can_be_overwritten(
    flyte: Flyte,
    version: str,
    recipe: Recipe,
    deleted_start: DeletedStart,
    record_property: Record,
) -> None:
    """An execution with `overwrite_cache` trains a cached base model again, and the next one takes
    that."""
    assert deleted_start.attempts[-1].cache == "CACHE_POPULATED"
    overwriting = flyte.start(WORKFLOW, version, recipe, "overwriting", overwrite_cache=True)
    trained = overwriting.wait_for_task(TASK, ("SUCCEEDED",), MAX_SECONDS)
    overwriting.abort("the base model was trained")
    assert trained.cache != "CACHE_HIT"
    reading = flyte.start(WORKFLOW, version, recipe, "reading")
    found = reading.wait_for_task(TASK, ("SUCCEEDED",), MAX_SECONDS)
    reading.abort("the cache was seen")
    assert found.cache == "CACHE_HIT"
    assert found.cached_in == overwriting.name
    record_property("seen", f"{trained.cache}, then {found.cache} of {overwriting.name}")
