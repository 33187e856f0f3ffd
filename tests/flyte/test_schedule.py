"""Nights of a schedule, each a minute after the one before: what is trained, and what is not."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from itertools import product
from string import ascii_uppercase
from typing import Any, NamedTuple

import pytest
import yaml
from flyte_cases import MAX_SECONDS, Flyte, MakeRecipe, Record, Register, find_parent_run
from flyte_engine import FINAL, EngineError, Execution
from flyte_recipes import ONLINE, build_promotable_changes, with_approval
from flyteidl.admin.common_pb2 import NamedEntityIdentifier, ResourceListRequest, Sort
from flyteidl.admin.execution_pb2 import ExecutionMetadata, WorkflowExecutionGetDataRequest
from flyteidl.admin.launch_plan_pb2 import ACTIVE, INACTIVE, LaunchPlanUpdateRequest
from flyteidl.core.identifier_pb2 import LAUNCH_PLAN, Identifier
from mlflow import MlflowClient

from tasks.request_approval import GATE

LETTERS = "ABC"
"""With which the prompts of each night that trains begin."""
STAGE = ONLINE | {"steps": 10}
PROMPTS = {"validation": 4, "held_out": 96}
"""A gain is proven at a share of a year's budget: that takes more steps and prompts than a gate
that is asked once.
"""
HELD_OUT_LETTER = "Z"
NUM_ENDINGS = 12
"""Letters of which two follow the first one of a prompt."""


def _write_prompts(address: str, beginning: str) -> None:
    """Put a prompt file to an address; the letters of all its prompts have this beginning."""
    endings = product(ascii_uppercase[:NUM_ENDINGS], repeat=2)
    text = "".join(f"{beginning}{''.join(ending)}\n" for ending in endings)
    plain = {"Content-Type": "text/plain"}
    request = urllib.request.Request(address, text.encode(), plain, method="PUT")
    with urllib.request.urlopen(request, timeout=60):
        pass


class Night(NamedTuple):
    """A night that has ended."""

    execution: Execution
    kickoff: float
    """Seconds since 1970."""
    started: datetime
    ended: datetime
    outcome: str
    """What the workflow has returned."""
    has_trained: bool


class Schedule:
    """A launch plan with a schedule, and the executions that it has started."""

    def __init__(self, flyte: Flyte, name: str, version: str, prompts: str) -> None:
        """Make a view of a schedule.

        Args:
            prompts: an address to which a PUT writes the prompt file of the recipe.
        """
        self.flyte = flyte
        self.prompts = prompts
        self.plan = Identifier(
            resource_type=LAUNCH_PLAN,
            project=flyte.project,
            domain=flyte.domain,
            name=f"workflows.launch_plans.{name}",
            version=version,
        )
        self.nights: list[Night] = []

    def activate(self, is_active: bool) -> None:
        state = ACTIVE if is_active else INACTIVE
        self.flyte.remote.client.raw.update_launch_plan(
            LaunchPlanUpdateRequest(id=self.plan, state=state)
        )

    def write_prompts(self, beginning: str) -> None:
        """Replace the prompt file; the letters of all its prompts have this beginning."""
        _write_prompts(self.prompts, beginning)

    def list_executions(self) -> list[Any]:
        """List the executions of the plan, the oldest first."""
        request = ResourceListRequest(
            id=NamedEntityIdentifier(project=self.flyte.project, domain=self.flyte.domain),
            filters=f"eq(launch_plan.name,{self.plan.name})",
            limit=100,
            sort_by=Sort(key="created_at", direction=Sort.ASCENDING),
        )
        return list(self.flyte.remote.client.raw.list_executions_paginated(request).executions)

    def finish_night(self) -> Night:
        """Wait for the next execution of the plan and for its end; a person says yes."""
        execution = self._wait_for_execution()
        self.flyte.started.append(execution)
        execution.wait_until(
            lambda: execution.read_phase() in FINAL or execution.is_asked(GATE),
            "the end or the gate",
            MAX_SECONDS,
            ends=True,
        )
        if execution.read_phase() not in FINAL:
            execution.answer(GATE, True)
        execution.wait_for_end(MAX_SECONDS)
        record = self.list_executions()[len(self.nights)]
        outputs = self.flyte.remote.client.raw.get_execution_data(
            WorkflowExecutionGetDataRequest(id=execution.id)
        )
        night = Night(
            execution,
            record.spec.metadata.scheduled_at.seconds,
            record.closure.created_at.ToDatetime(),
            record.closure.updated_at.ToDatetime(),
            outputs.full_outputs.literals["o0"].scalar.primitive.string_value,
            bool(execution.attempts_of("start_run")),
        )
        self.nights.append(night)
        return night

    def finish_training_night(self) -> Night:
        """Wait for the end of the next night that trains: one that began before the prompts were
        written may find nothing changed.
        """
        while True:
            night = self.finish_night()
            if night.has_trained:
                return night

    def _wait_for_execution(self) -> Execution:
        deadline = time.monotonic() + MAX_SECONDS
        while time.monotonic() < deadline:
            executions = self.list_executions()
            if len(executions) > len(self.nights):
                execution = executions[len(self.nights)]
                assert execution.spec.metadata.mode == ExecutionMetadata.SCHEDULED
                return Execution(self.flyte.remote, execution.id)
            time.sleep(3)
        raise EngineError(
            f"no execution of {self.plan.name} in {MAX_SECONDS} s; is Flyte's scheduler running?"
        )


class Nights(NamedTuple):
    """What the nights of a schedule came to."""

    schedule: Schedule
    trained: list[Night]
    """Nights that trained, each with other prompts; a person says yes where there is a question."""
    unchanged: Night
    """A night after them."""
    champions: list[str | None]
    """The champion's version after each of the nights that trained."""


@pytest.fixture(scope="module")
def schedule(
    flyte: Flyte,
    register: Register,
    make_recipe: MakeRecipe,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Schedule]:
    """A schedule of the deployment file that fires every minute; it is not active yet."""
    held_out, prompts = (
        flyte.remote.client.get_upload_signed_url(
            flyte.project,
            flyte.domain,
            filename=name,
            filename_root=f"{flyte.run}-nights",
            add_content_md5_metadata=False,
        )
        for name in ("held_out.txt", "prompts.txt")
    )
    # The gate of a model keeps to its held-out prompts: they are no part of what changes.
    _write_prompts(held_out.signed_url, HELD_OUT_LETTER)
    changes = build_promotable_changes(STAGE, policy={"start": "champion"})
    changes["prompts"] = PROMPTS | {
        "source": prompts.native_url,
        "held_out_source": held_out.native_url,
    }
    recipe = make_recipe("nights", **with_approval(changes))
    file = tmp_path_factory.mktemp("nights") / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_unset=True)))
    name = f"{flyte.run.replace('-', '_')}_nights"
    version = register(schedules=[{"name": name, "recipe": str(file), "cron": "* * * * *"}])
    schedule = Schedule(flyte, name, version, prompts.signed_url)
    yield schedule
    schedule.activate(False)


@pytest.fixture(scope="module")
def nights(flyte: Flyte, schedule: Schedule) -> Nights:
    """Nights of a schedule with a prompt file that changes."""
    store = MlflowClient(flyte.mlflow, flyte.mlflow)
    trained = []
    champions = []
    for letter in LETTERS:
        schedule.write_prompts(letter)
        schedule.activate(True)
        trained.append(schedule.finish_training_night())
        model = store.get_registered_model(f"{flyte.run}-nights")
        champions.append(model.aliases.get("champion"))
    # A new champion is a change, too: after it, the same prompts are trained once more.
    unchanged = schedule.finish_night()
    while unchanged.has_trained:
        unchanged = schedule.finish_night()
    schedule.activate(False)
    return Nights(schedule, trained, unchanged, champions)


def test_a_night_without_a_change_ends_at_once(nights: Nights, record_property: Record) -> None:
    """A night in which nothing has changed trains nothing and says so."""
    night = nights.unchanged
    assert night.outcome.startswith("nothing changed since run tiny-seed")
    assert night.outcome.endswith("nothing was trained")
    assert not night.has_trained
    tasks = [attempt.short_task for attempt in night.execution.list_attempts()]
    assert tasks == ["plan_retraining", "train_if_changed"]
    seconds = (night.ended - night.started).total_seconds()
    record_property("seen", f"{seconds:.0f} s: {night.outcome[:60]}")


def test_nights_have_seeds_and_prompts_of_their_own(
    flyte: Flyte, nights: Nights, record_property: Record
) -> None:
    """A night of the deployment's schedule has the time of its kickoff as seed, and reads the
    prompt file anew."""
    runs = [find_parent_run(flyte, night.execution) for night in nights.trained]
    for night, run in zip(nights.trained, runs, strict=True):
        assert f"seed{night.kickoff:.0f}" in run.info.run_name
        assert run.info.status == "FINISHED"
    digests = {run.data.tags["ebbflow.retrained_from"] for run in runs}
    assert len(digests) == len(LETTERS)
    record_property("seen", ", ".join(run.info.run_name for run in runs))


def test_the_champion_moves_or_the_night_says_why_not(
    nights: Nights, record_property: Record
) -> None:
    """After a night the champion is its version, or the outcome of the night says why not; one
    night of three at least moves it."""
    champion = None
    for number, night in enumerate(nights.trained, 1):
        if "is champion" in night.outcome:
            champion = str(number)
        else:
            assert "stays challenger: " in night.outcome
            assert "Refused: " in night.outcome
        assert nights.champions[number - 1] == champion
    assert champion is not None
    outcomes = [night.outcome.partition("-nights ")[2][:80] for night in nights.trained]
    record_property("seen", "; ".join(outcomes))


def test_nights_do_not_overlap(nights: Nights, record_property: Record) -> None:
    """A night is skipped while the one before still runs or waits for its approval."""
    ended = nights.schedule.nights
    pairs = list(zip(ended, ended[1:], strict=False))
    assert [earlier.ended <= later.started for earlier, later in pairs] == [True] * len(pairs)
    skipped = sum((later.kickoff - earlier.kickoff) // 60 - 1 for earlier, later in pairs)
    assert skipped > 0
    record_property("seen", f"{len(ended)} nights, {skipped:.0f} kickoffs skipped")
