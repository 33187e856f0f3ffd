"""A pod that is told to go ends at once, although it is the first process of its container."""

from __future__ import annotations

import os
import signal
import site
from collections.abc import Callable

import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from ebbflow.training.stop_conditions import handle_sigterm
from tasks.elastic import GracefulElastic, GracefulElasticTask
from tasks.preemption import LOST_MACHINE, end_at_sigterm, retry_on_errors
from tests.pipeline.conftest import ROOT

FIRST_PROCESS = ROOT / "containers" / "environment" / "first_process.pth"


def _start_python() -> None:
    """Do what an image's Python does at its start, before it imports anything of ours."""
    site.addpackage(str(FIRST_PROCESS.parent), FIRST_PROCESS.name, set())


@pytest.mark.parametrize("prepare", [end_at_sigterm, _start_python])
@pytest.mark.parametrize(("pid", "code"), [(1, LOST_MACHINE), (7, -signal.SIGTERM)])
def test_a_sigterm_ends_the_first_process(
    monkeypatch: pytest.MonkeyPatch, pid: int, code: int, prepare: Callable[[], None]
) -> None:
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        monkeypatch.setattr(os, "getpid", lambda: pid)
        prepare()
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


def test_a_handler_of_the_process_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def handler(number: int, frame: object) -> None: ...

    monkeypatch.setattr(os, "getpid", lambda: 1)
    previous = signal.signal(signal.SIGTERM, handler)
    try:
        end_at_sigterm()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_a_preemption_says_its_cause_once() -> None:
    with pytest.raises(FlyteRecoverableException) as raised, retry_on_errors(OSError):
        raise OSError("1.1 online was preempted (SIGTERM) after 3 of 8 steps")
    assert str(raised.value).count("was preempted") == 1
    assert raised.traceback[-1].name == "test_a_preemption_says_its_cause_once"


def test_a_sigterm_between_two_stages_ends_the_second_before_it_has_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []
    monkeypatch.setattr(
        GracefulElasticTask, "_launch_processes", lambda task, **_: started.append(task.name)
    )
    task = GracefulElasticTask(GracefulElastic(nnodes=1, nproc_per_node=2), _train)
    # As an online stage leaves it, whose last step was over when the signal came.
    with handle_sigterm():
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(FlyteRecoverableException, match="was terminated before it had processes"):
        task.execute()
    assert started == []
    task.execute()
    assert len(started) == 1


def _train() -> None:
    """Stand for a task's function."""
