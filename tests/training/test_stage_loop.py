"""The frame of a stage's loop: what a person sees of its steps."""

from __future__ import annotations

import logging

import pytest

from ebbflow import progress
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training import stage_loop
from ebbflow.training.stage_loop import StageLoop, StageState

pytestmark = pytest.mark.any_cpu


@pytest.mark.parametrize("quiet", [False, True])
def test_without_a_terminal_steps_are_lines_of_the_log(make_recipe, caplog, monkeypatch, quiet):
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    recorder = MetricsRecorder()
    loop = StageLoop(
        StageContext(make_recipe(), 0, 0),
        StageState(step=1),
        recorder,
        None,
        num_steps=3,
        gpus=0,
        quiet=quiet,
    )
    caplog.set_level(logging.INFO, "ebbflow")
    for step in loop.iterate_steps():
        loop.finish_step({"loss": 0.5}, reward=f"0.{step}")
    lines = [message for message in caplog.messages if "reward=" in message]
    assert [line.partition(" steps")[0] for line in lines] == (
        [] if quiet else [f"1.1 online mix_grpo: {n} of 3" for n in (2, 3)]
    )
    assert [line.partition("reward=")[2] for line in lines] == ([] if quiet else ["0.1", "0.2"])
    assert [row["step"] for row in recorder.metrics_rows] == [1, 2]


@pytest.mark.parametrize("quiet", [False, True])
def test_an_alarm_is_pushed_once_when_it_rings_by_the_first_rank_alone(
    make_recipe, monkeypatch, quiet
):
    pushed = []
    monkeypatch.setattr(stage_loop, "send_alert_in_background", pushed.append)
    state = StageState(alarms=["rang before the checkpoint"])
    recipe = make_recipe()
    context = StageContext(recipe, 0, 0)
    loop = StageLoop(context, state, MetricsRecorder(), None, num_steps=2, gpus=0, quiet=quiet)
    at_step = []
    for step in loop.iterate_steps():
        if step == 0:
            state.training_alarms = ["drift 2 above drift_alarm = 1"]
        loop.finish_step({})
        at_step.append(len(pushed))
    lines = [f"{recipe.name}, stage 1.1 online: drift 2 above drift_alarm = 1"]
    assert pushed == ([] if quiet else lines)
    assert at_step == ([0, 0] if quiet else [1, 1])


def test_an_alarm_of_a_stage_without_steps_is_pushed(make_recipe, monkeypatch):
    pushed = []
    monkeypatch.setattr(stage_loop, "send_alert_in_background", pushed.append)
    state = StageState()
    loop = StageLoop(
        StageContext(make_recipe(), 0, 0), state, MetricsRecorder(), None, num_steps=0, gpus=0
    )
    state.training_alarms = ["nothing was learnt"]
    assert list(loop.iterate_steps()) == []
    assert len(pushed) == 1
    assert pushed[0].endswith(": nothing was learnt")
