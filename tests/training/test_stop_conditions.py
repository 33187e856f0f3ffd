"""A stage hears of its machine's end and of its budget's in time."""

from __future__ import annotations

import os
import signal
import time
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch.distributed as dist

from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.resume import SIGTERM_CAME
from ebbflow.training import stop_conditions
from ebbflow.training.distributed import join_process_group
from ebbflow.training.passes import TrainingError
from ebbflow.training.stop_conditions import (
    EXPIRES,
    Preempted,
    Stop,
    StopConditions,
    handle_sigterm,
)
from tests.two_processes import as_two_ranks

pytestmark = pytest.mark.any_cpu


@pytest.fixture
def clock(monkeypatch):
    """``clock.pass_(seconds)``: both clocks of the module move when a test says so."""

    class Clock:
        now = 1_800_000_000.0

        def pass_(self, seconds):
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(stop_conditions.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(stop_conditions.time, "time", lambda: clock.now)
    return clock


def after_steps(limit, clock, *seconds):
    """What is said after steps that take so long."""
    said = []
    for each in seconds:
        clock.pass_(each)
        said.append(limit.check_after_step())
    return said


def test_without_conditions_it_continues(clock):
    assert after_steps(StopConditions(OnlineStageConfig(), gpus=0), clock, 1, 1e6) == [
        Stop.NO,
        Stop.NO,
    ]


def test_no_step_is_begun_that_the_budget_would_not_see_the_end_of(clock):
    limit = StopConditions(OnlineStageConfig(max_hours=1), gpus=0)
    assert after_steps(limit, clock, 1000, 1600, 1) == [Stop.NO, Stop.SPENT, Stop.SPENT]
    assert limit.budget_message(2, 9) == "ended after 2 of 9 steps: max_hours = 1"


def test_the_hours_of_earlier_attempts_and_of_every_gpu_count(clock):
    assert after_steps(
        StopConditions(OnlineStageConfig(max_hours=1), gpus=0, seconds_before=3000), clock, 100, 300
    ) == [
        Stop.NO,
        Stop.SPENT,
    ]
    limit = StopConditions(OnlineStageConfig(max_gpu_hours=4), gpus=8)
    assert after_steps(limit, clock, 800, 300) == [Stop.NO, Stop.SPENT]
    assert limit.reason == "max_gpu_hours = 4"


def test_gpu_hours_need_gpus():
    with pytest.raises(
        TrainingError, match=r"max_gpu_hours = 2 and the stage has no GPU; use max_hours"
    ):
        StopConditions(OnlineStageConfig(max_gpu_hours=2), gpus=0)


def expire(monkeypatch, clock, seconds, zone=UTC):
    monkeypatch.setenv(EXPIRES, datetime.fromtimestamp(clock.now + seconds, zone).isoformat())


def test_a_machine_is_left_while_there_is_time_for_a_step_and_to_save(clock, monkeypatch):
    expire(monkeypatch, clock, 1000, timezone(timedelta(hours=-7)))
    limit = StopConditions(OnlineStageConfig(), gpus=0)
    assert after_steps(limit, clock, 200, 200, 250) == [Stop.NO, Stop.NO, Stop.LEAVE]
    assert EXPIRES in limit.preemption_message("1.1 online", 3, 9, saved=True)
    expire(monkeypatch, clock, 100)
    assert after_steps(StopConditions(OnlineStageConfig(), gpus=0), clock, 1, 40) == [
        Stop.NO,
        Stop.LEAVE,
    ]


def test_steps_in_flight_are_waited_for(clock, monkeypatch):
    expire(monkeypatch, clock, 1000)
    assert after_steps(
        StopConditions(OnlineStageConfig(), gpus=0, steps_ahead=2), clock, 200, 1
    ) == [Stop.NO, Stop.LEAVE]


@pytest.mark.parametrize(
    ("text", "says"), [("tomorrow", "no time with a zone"), ("2026-01-31T18:00:00", "with a zone")]
)
def test_a_time_of_expiry_that_is_none(monkeypatch, text, says):
    monkeypatch.setenv(EXPIRES, text)
    with pytest.raises(TrainingError, match=rf"{EXPIRES} = '{text}' .*{says}"):
        StopConditions(OnlineStageConfig(), gpus=0)


def test_a_machine_that_has_expired_is_not_begun_on(clock, monkeypatch):
    expire(monkeypatch, clock, -1)
    with pytest.raises(TrainingError, match="is past"):
        StopConditions(OnlineStageConfig(), gpus=0)


def test_the_first_sigterm_is_a_request_and_the_handler_before_comes_back():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        limit = StopConditions(OnlineStageConfig(), gpus=0)
        with handle_sigterm(), handle_sigterm():
            assert limit.check_after_step() is Stop.NO
            os.kill(os.getpid(), signal.SIGTERM)
            assert limit.check_after_step() is Stop.LEAVE
            assert heard == []
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0)
            assert heard == [signal.SIGTERM]
        assert "(SIGTERM) after 3 of 9 steps; a checkpoint is saved" in limit.preemption_message(
            "1.1 online", 3, 9, saved=True
        )
        assert "nothing is saved" in limit.preemption_message("1.1 online", 3, 9, saved=False)
    finally:
        signal.signal(signal.SIGTERM, before)
        SIGTERM_CAME.clear()


def test_a_word_that_came_too_late_for_one_stage_is_for_the_next():
    before = signal.getsignal(signal.SIGTERM)
    with handle_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    limit = StopConditions(OnlineStageConfig(), gpus=0)
    said = limit.check_after_step()
    with pytest.raises(Preempted), handle_sigterm():
        raise Preempted
    assert (said, limit.check_after_step()) == (Stop.LEAVE, Stop.NO)
    assert signal.getsignal(signal.SIGTERM) is before


def heard_by_one(folder: Path) -> None:
    """Rank 1 alone hears; both say what they then do."""
    with join_process_group() as ranks:
        limit = StopConditions(OnlineStageConfig(), gpus=0)
        first = limit.check_after_step()
        if ranks.rank == 1:
            SIGTERM_CAME.set()
        second = limit.check_after_step()
        (folder / f"{ranks.rank}").write_text(
            f"{first.name} {second.name} {limit.preemption_message('s', 1, 2, saved=True)}"
        )


def test_all_processes_leave_when_one_hears(tmp_path):
    as_two_ranks(heard_by_one, tmp_path)
    said = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert [text.split()[:2] for text in said] == [["NO", "LEAVE"]] * 2
    assert "another process was preempted" in said[0]
    assert "SIGTERM" in said[1]
    assert not dist.is_initialized()
