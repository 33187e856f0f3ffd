"""An approval that waits: who is told, how often, and what becomes of it."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from flyteidl.admin.signal_pb2 import Signal

from ebbflow.data.records import Registration, TrackedRun
from ebbflow.recipe import Recipe
from tasks import executions, watch_approval
from tasks.request_approval import GATE, request_approval
from tests.pipeline.test_retraining import DECISION

EXECUTION = "project/domain/a6f2"
HOURS = 72
REPORT = "s3://runs/a6f2/report.html"


class Clock:
    """The time of ``watch_approval``, which passes as it sleeps."""

    def __init__(self) -> None:
        self.time = datetime(2026, 11, 25, tzinfo=UTC)

    def now(self, zone: object) -> datetime:
        return self.time

    def sleep(self, seconds: float) -> None:
        # An hour a poll, not to poll three days minute by minute.
        self.time += timedelta(hours=1)


class Console:
    """Flyte's API, where a person answers after ``answer_after`` hours, or never."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer_after: float | None) -> None:
        self.clock = Clock()
        self.asked_at = self.clock.time
        self.answer_after = answer_after
        self.away: range = range(0)
        """The hours in which Flyte does not answer."""
        self.alerts: list[str] = []
        self.refused: list[str] = []
        monkeypatch.setattr(watch_approval, "datetime", self.clock)
        monkeypatch.setattr(watch_approval.time, "sleep", self.clock.sleep)
        monkeypatch.setattr(watch_approval, "send_alert", self.alerts.append)
        monkeypatch.setattr(executions, "is_answered", self.is_answered)
        monkeypatch.setattr(executions, "refuse", lambda name, gate: self.refused.append(gate))

    def is_answered(self, execution: str, gate: str) -> bool:
        assert (execution, gate) == (EXECUTION, GATE)
        hours = (self.clock.time - self.asked_at) / timedelta(hours=1)
        if hours == 3 or hours in self.away:
            raise ConnectionError("Flyte is restarted")
        return self.answer_after is not None and hours >= self.answer_after

    def wait(self) -> str:
        deadline = self.asked_at + timedelta(hours=HOURS)
        return watch_approval.wait_for_answer(
            EXECUTION, "m version 3", REPORT, self.asked_at, deadline
        )


def test_a_question_that_is_answered_is_recorded_as_it_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = Console(monkeypatch, answer_after=5)
    assert console.wait() == "m version 3"
    assert (console.alerts, console.refused) == ([], [])


def test_people_are_reminded_once_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(monkeypatch, answer_after=50)
    console.wait()
    assert console.alerts == [
        f"m version 3 still waits for approval, {hours} hours more ({EXECUTION}); report: {REPORT}"
        for hours in (48, 24)
    ]


def test_without_an_answer_it_is_not_approved(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(monkeypatch, answer_after=None)
    assert console.wait() == "m version 3: nobody answered in 72 hours"
    assert console.refused == [GATE]
    assert console.alerts[-1] == "m version 3: nobody answered in 72 hours; the champion stays"


def test_a_yes_is_not_overruled_where_flyte_is_away_when_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = Console(monkeypatch, answer_after=71)
    console.away = range(71, 73)
    assert console.wait() == "m version 3"
    assert (console.refused, console.alerts[2:]) == ([], [])


def test_a_pod_that_replaces_a_lost_one_does_not_repeat_reminders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = Console(monkeypatch, answer_after=60)
    console.clock.time += timedelta(hours=30)
    console.wait()
    assert console.alerts == [
        f"m version 3 still waits for approval, 24 hours more ({EXECUTION}); report: {REPORT}"
    ]


@pytest.mark.parametrize("hours_later", [-1, 100])
def test_a_recovered_execution_asks_anew(monkeypatch: pytest.MonkeyPatch, hours_later: int) -> None:
    console = Console(monkeypatch, answer_after=None)
    started_at = console.asked_at + timedelta(hours=hours_later)
    record = MagicMock()
    # Flyte's client gives times in UTC.
    record.closure.started_at = started_at
    remote = MagicMock()
    remote.client.get_execution.return_value = record
    monkeypatch.setattr("flytekit.remote.FlyteRemote", lambda *_: remote)
    allowed = timedelta(hours=HOURS)
    since = watch_approval.find_time_of_question(
        EXECUTION, "m version 3", console.asked_at, allowed
    )
    recovered = hours_later > 0
    assert since == (started_at if recovered else console.asked_at)
    line = f"m version 3 waits for approval in {EXECUTION}, for 72 hours"
    assert console.alerts == ([line] if recovered else [])


def test_where_flyte_is_away_the_time_of_the_question_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = Console(monkeypatch, answer_after=None)

    def raise_error(execution: str) -> None:
        raise ConnectionError("Flyte is restarted")

    monkeypatch.setattr(executions, "find_start", raise_error)
    since = watch_approval.find_time_of_question(
        EXECUTION, "m version 3", console.asked_at, timedelta(hours=HOURS)
    )
    assert since == console.asked_at


@pytest.mark.parametrize(("value", "answered"), [(None, False), (True, True), (False, True)])
def test_flyte_says_whether_a_gate_has_its_value(
    value: bool | None, answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal = Signal()
    signal.id.signal_id = GATE
    if value is not None:
        signal.value.scalar.primitive.boolean = value
    remote = MagicMock()
    remote.list_signals.return_value = [signal]
    monkeypatch.setattr("flytekit.remote.FlyteRemote", lambda *_: remote)
    assert executions.is_answered(EXECUTION, GATE) == answered
    executions.refuse(EXECUTION, GATE)
    (call,) = remote.set_input.call_args_list
    assert call.args == (GATE, "a6f2", False, "project", "domain")


def test_on_a_cluster_the_question_names_the_deck_and_the_alert_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alerts: list[str] = []
    run_logger = MagicMock()
    context = SimpleNamespace(execution_id=SimpleNamespace(project="p", domain="d", name="a6f2"))
    monkeypatch.setattr("tasks.request_approval.current_context", lambda: context)
    monkeypatch.setattr("ebbflow.alerts.send_alert", alerts.append)
    monkeypatch.setattr(
        "ebbflow.tracking.child_run.open_node_run", lambda run, node: nullcontext(run_logger)
    )
    folder = "s3://bucket/a/long/way/to/glyph-1f3a9c2e"
    run = TrackedRun(
        run_id="1f3a9c2e",
        experiment_id="1",
        tracking_uri="",
        folder=folder,
        recipe_digest="",
        started_at=0.0,
    )
    request = request_approval.task_function(
        recipe=Recipe.model_validate({"promotion": {"approval": 2}}),
        run=run,
        decision=DECISION,
        registration=Registration(model_name="m", version="3", champion=False, previous=None),
        report=MagicMock(),
    )
    assert request.question.startswith("m version 3 as champion (")
    assert request.question.endswith("; Flyte Deck of write_report, run glyph-1f3a9c2e)")
    assert alerts[0].endswith(f"; report: {folder}/report.html")
    (params,) = run_logger.log_params.call_args.args
    assert (params["question"], params["report"]) == (request.question, f"{folder}/report.html")
