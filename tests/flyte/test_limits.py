"""Limits that a run meets: a mistake in its recipe, and the hours of a pod."""

from __future__ import annotations

import pytest
from flyte_cases import (
    MAX_SECONDS,
    WORKFLOW,
    Flyte,
    ListPods,
    MakeRecipe,
    Record,
    Register,
    find_parent_run,
)
from flyte_engine import Execution
from flyte_recipes import ONLINE, build_promotable_changes
from flyteidl.core.literals_pb2 import Literal

MANUAL = "workflows.launch_plans.manual"
TYPO = '{"stages": [{"kind": "online", "algorithm": {"name": "mixgrpo"}}]}'
MAX_HOURS = 0.02
RETRIES = 1
TASK = "train_online_colocated"
COLOCATED = ONLINE | {
    "placement": "colocated",
    "checkpoints": {"every": 1},
    "steps": 2000,
    "group_size": 4,
}
"""A stage that is not done after all attempts."""


def test_a_typo_is_what_the_console_shows_first(
    flyte: Flyte, version: str, record_property: Record
) -> None:
    """A typo in a recipe of the launch form: the console's error box begins with our sentence."""
    literal = Literal()
    literal.scalar.primitive.string_value = TYPO
    execution = flyte.start_plan(MANUAL, version, literal, "typo")
    execution.wait_for_end(MAX_SECONDS, "FAILED")
    (attempt,) = execution.attempts_of("read_recipe")
    # The box of the node; that of the execution puts its name in front.
    first, second, *_ = attempt.message.strip().splitlines()
    assert first == "this recipe cannot be run:"
    assert second.startswith("recipe:1: stages.0.online.algorithm.name = 'mixgrpo': did you mean")
    record_property("seen", second[:100])


@pytest.fixture(scope="module")
def overdue_run(
    flyte: Flyte,
    register: Register,
    make_recipe: MakeRecipe,
    deployment: dict[str, object],
) -> Execution:
    """A run whose training takes longer than its pods may run."""
    group = deployment["training_group"]
    assert isinstance(group, dict)
    limits = {"max_hours": MAX_HOURS, "retries": RETRIES}
    version = register(training_group=group | limits, train_nodes=1, train_processes=1)
    recipe = make_recipe("overdue", **build_promotable_changes(COLOCATED))
    execution = flyte.start(WORKFLOW, version, recipe, "overdue")
    execution.wait_for_end(MAX_SECONDS, "FAILED")
    return execution


def test_max_hours_limits_an_attempt(
    overdue_run: Execution, list_pods: ListPods, record_property: Record
) -> None:
    """`max_hours` ends the pod of each attempt; after the last retry the run fails."""
    attempts = overdue_run.attempts_of(TASK)
    assert [attempt.phase for attempt in attempts] == ["FAILED"] * (1 + RETRIES)
    pods = list_pods(overdue_run, TASK)
    assert {pod.spec.active_deadline_seconds for pod in pods} == {MAX_HOURS * 3600}
    assert {pod.status.reason for pod in pods} == {"DeadlineExceeded"}
    record_property(
        "seen",
        f"{MAX_HOURS * 3600:.0f} s, {len(attempts)} attempts: {attempts[0].message.strip()[-120:]}",
    )


def test_a_failed_run_is_failed_in_mlflow(
    flyte: Flyte, overdue_run: Execution, record_property: Record
) -> None:
    """A run that fails outside our code is FAILED in MLflow at once, by the workflow's failure
    node."""
    run = find_parent_run(flyte, overdue_run)
    assert run.info.status == "FAILED"
    record_property("seen", "FAILED")
