"""The frame of a stage's loop: what a person sees of its steps."""

from __future__ import annotations

import logging

import pytest

from ebbflow import progress
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training.stage_loop import StageLoop, StageState


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
