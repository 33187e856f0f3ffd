"""Progress of long work: a bar on a terminal, a line every so often in a log."""

from __future__ import annotations

import io
import logging

import pytest

from ebbflow import progress as module
from ebbflow.progress import INTERVAL, show_progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What tqdm takes for the time: the last element."""
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[-1])
    return now


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == module.__name__]


def test_a_log_gets_a_line_at_every_interval_and_at_the_end(
    caplog: pytest.LogCaptureFixture, clock: list[float]
) -> None:
    caplog.set_level(logging.INFO)
    with show_progress("1.1 online", "step", total=100, done=10) as monitored:
        for _ in range(90):
            clock.append(clock[-1] + INTERVAL / 10)
            monitored.set_postfix({"reward": "0.5"}, refresh=False)
            monitored.update()
    said = lines(caplog)
    assert len(said) == 9, said
    assert said[0].startswith("1.1 online: 20 of 100 steps, 00:30 so far, ")
    assert "left, reward=0.5" in said[0]
    assert said[-1].startswith("1.1 online: 100 of 100 steps")


def test_a_unit_has_its_plural(caplog: pytest.LogCaptureFixture, clock: list[float]) -> None:
    caplog.set_level(logging.INFO)
    for unit in ("step", "batch"):
        with show_progress("work", unit, total=2) as monitored:
            clock.append(clock[-1] + 2 * INTERVAL)
            monitored.update(2)
    assert [line.partition(",")[0] for line in lines(caplog)] == [
        "work: 2 of 2 steps",
        "work: 2 of 2 batches",
    ]


def test_short_work_is_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert list(show_progress("short", "step", range(1000))) == list(range(1000))
    assert not lines(caplog)


@pytest.mark.parametrize("quiet", [False, True])
def test_a_terminal_gets_a_bar(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, quiet: bool
) -> None:
    caplog.set_level(logging.INFO)
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    assert list(show_progress("on a terminal", "step", range(3), quiet=quiet)) == [0, 1, 2]
    assert ("on a terminal: 100%" in terminal.getvalue()) is not quiet
    assert not lines(caplog)
