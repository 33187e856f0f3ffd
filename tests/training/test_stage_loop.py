"""The frame of a stage's loop: what a person sees of its steps."""

from __future__ import annotations

import logging

import pytest

from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training import stop_conditions
from ebbflow.training.stage_loop import StageLoop, StageState


@pytest.mark.parametrize("quiet", [False, True])
def test_without_a_terminal_each_step_is_a_line_of_the_log(make_recipe, caplog, monkeypatch, quiet):
    now = 100.0
    monkeypatch.setattr(stop_conditions.time, "monotonic", lambda: now)
    recorder = MetricsRecorder()
    loop = StageLoop(StageContext(make_recipe(), 0, 0), StageState(step=1), recorder, None, num_steps=3, gpus=0, quiet=quiet)
    caplog.set_level(logging.INFO, "ebbflow")
    for step in loop.steps():
        now += 1.5
        loop.finish_step({"loss": 0.5}, reward=f"0.{step}")
    lines = ["1.1 online mix_grpo: step 2 of 3, reward 0.1, 1.5 s", "1.1 online mix_grpo: step 3 of 3, reward 0.2, 1.5 s"]
    assert caplog.messages == ([] if quiet else lines)
    assert [row["step"] for row in recorder.metrics] == [1, 2]
