"""What hangs is named, with the stacks of all threads."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ebbflow import watchdog
from ebbflow.data.prompts import Prompt
from ebbflow.rewards.base import RewardResult
from ebbflow.rewards.groups import score_samples
from ebbflow.watchdog import STALL, Watchdog, describe_activities, path_of_stacks, watch
from tests.forked import ROOT, run_forked


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Watchdog:
    """A watchdog of this process that says after .2 s what takes long, and never calls it a stall
    by itself.
    """
    impatient = Watchdog(stall_seconds=3600)
    monkeypatch.setattr(watchdog, "_watchdog", impatient)
    monkeypatch.setattr(watchdog, "SAY_AFTER_SECONDS", 0.2)
    return impatient


def _wait_for(condition: object) -> None:
    """Wait until a condition holds, as long as a busy machine may need."""
    assert callable(condition)
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class HangingReward:
    """A reward whose call ends when a test lets it."""

    name = "mine"
    scores = "images"

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def __call__(self, samples: np.ndarray, prompts: list[Prompt]) -> RewardResult:
        self.may_end.wait(60)
        return RewardResult(np.zeros(len(samples)))


def test_a_reward_that_hangs_is_named_while_it_hangs(
    impatient: Watchdog, caplog: pytest.LogCaptureFixture
) -> None:
    reward = HangingReward()
    caplog.set_level(logging.INFO)
    thread = threading.Thread(
        target=score_samples,
        args=(reward, np.zeros((2, 8, 8, 3), np.uint8), []),
    )
    thread.start()
    _wait_for(lambda: "the reward 'mine', scoring 2 samples, has taken" in caplog.text)
    (activity,) = describe_activities()
    assert activity.startswith("the reward 'mine', scoring 2 samples, for ")
    reward.may_end.set()
    thread.join()
    assert describe_activities() == []


def test_lines_become_rarer(impatient: Watchdog, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    number = impatient.add("loading the model")
    activity = impatient.activities[number]
    for minutes in range(1, 17):
        activity.since = time.monotonic() - 60 * minutes
        activity.say_after = max(activity.say_after, 60)
        impatient.look()
    assert caplog.text.count("loading the model has taken") == 5  # 1, 2, 4, 8 and 16 minutes


def test_a_stall_is_an_alarm_with_the_stacks_of_all_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    alerts: list[str] = []
    monkeypatch.setattr(watchdog, "send_alert_in_background", alerts.append)
    monkeypatch.setattr(watchdog, "path_of_stacks", lambda: tmp_path / "stacks.txt")
    patient = Watchdog(stall_seconds=600)
    number = patient.add("rank 1: training step 3 of 8")
    patient.activities[number].since -= 601
    patient.look()
    patient.look()
    (alert,) = alerts
    assert alert.startswith("rank 1: training step 3 of 8 has taken 10")
    assert f"({STALL}), process {os.getpid()} on " in alert
    assert "the stacks of all threads are in" in caplog.text
    stacks = (tmp_path / "stacks.txt").read_text()
    assert "test_a_stall_is_an_alarm" in stacks
    # What stalls stands above its stacks.
    assert stacks.splitlines()[0].endswith(": rank 1: training step 3 of 8")


def test_a_stall_is_an_alarm_where_no_file_can_be_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    alerts: list[str] = []
    monkeypatch.setattr(watchdog, "send_alert_in_background", alerts.append)
    monkeypatch.setattr(watchdog, "path_of_stacks", lambda: tmp_path / "gone" / "stacks.txt")
    patient = Watchdog(stall_seconds=600)
    for name in ("the first", "the second"):
        patient.activities[patient.add(name)].since -= 601
    patient.look()
    assert [alert.partition(" has taken")[0] for alert in alerts] == ["the first", "the second"]
    assert caplog.text.count("the stacks of its threads cannot be written") == 2


@pytest.mark.parametrize("value", ["0", "-1", "soon"])
def test_a_limit_that_is_no_number_of_minutes_is_refused(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STALL, value)
    with pytest.raises(ValueError, match=f"{STALL}={value} is no number of minutes above 0"):
        watchdog.enable_stack_dumps()


@pytest.mark.parametrize(
    "enable",
    [
        "from ebbflow.watchdog import enable_stack_dumps\nenable_stack_dumps()\n",
        "from ebbflow.online.ray_actor import WorkerActor\nWorkerActor('reward', None, [])\n",
    ],
    ids=["the process of a stage", "an actor of Ray"],
)
def test_sigusr1_writes_the_stacks_and_the_process_goes_on(enable: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, time\n"
        f"{enable}"
        "def hang_here():\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    print('went on')\n"
        "hang_here()\n"
    )
    # What the fork's own handler wrote would be in another file.
    done = run_forked([str(program)], cwd=ROOT, env=os.environ, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "went on\n"
    assert "in hang_here" in done.stderr


def test_a_fork_has_a_watchdog_of_its_own(impatient: Watchdog, tmp_path: Path) -> None:
    with watch("the parent"):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            with watch("the child"):
                thread = impatient.thread
                alive = thread is not None and thread.is_alive()
                # What the parent does is not named here, or it would be an alarm for ever.
                names = [activity.name for activity in impatient.activities.values()]
                os.write(write, b"yes" if alive and names == ["the child"] else b"no")
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 3) == b"yes"
    os.close(read)
    os.close(write)
    assert path_of_stacks().name == f"stacks-{os.getpid()}.txt"
