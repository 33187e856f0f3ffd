"""What a worker's timer and the timeline of a stage make of the times that they are given."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from ebbflow.online.messages import TaskTimer, TraceSpan
from ebbflow.online.timeline import Timeline
from ebbflow.plots.charts import Span, plot_timeline
from ebbflow.recipe.online import ResourcesConfig


def test_of_a_step_a_worker_profiles_the_first_task_and_says_what_that_took():
    timer = TaskTimer("reward", 2)
    timed = []
    for step in (3, 3, 4):
        with timer.time_task("scoring", step, profiled=True) as spans:
            torch.ones(3) + 1
        timed += spans
    with timer.time_task("scoring", 5) as spans:
        pass
    timed += spans
    spans = [(busy.task, busy.step, set(busy.files)) for busy in timed]
    profiled = {step: [("scoring", step, {"json.gz"}), ("profile", step, set())] for step in (3, 4)}
    assert spans == [*profiled[3], ("scoring", 3, set()), *profiled[4], ("scoring", 5, set())]


def test_utilisation_is_the_busy_share_of_a_steps_own_time():
    """Two rollout workers. Work that spans two steps counts in both, as much as lies in each."""
    watched = Timeline(ResourcesConfig.model_validate({"rollout": {"count": 2}}))
    watched.steps = {0: (10.0, 20.0), 1: (20.0, 24.0)}
    watched.add_spans(
        [
            TraceSpan("training", 0, "training", 0, 14.0, 19.0),
            TraceSpan("rollout", 0, "rollout", 0, 10.0, 14.0),
            TraceSpan("rollout", 1, "rollout", 1, 16.0, 22.0),
            TraceSpan("rollout", 0, "validation", 1, 9.0, 10.0),
        ]
    )
    assert watched.compute_utilisation(0, 1) == pytest.approx(
        {"utilisation/training": 0.5, "utilisation/rollout": 0.4, "utilisation/reward": 0}
    )
    assert watched.compute_utilisation(1, 1) == pytest.approx(
        {"utilisation/training": 0, "utilisation/rollout": 0.25, "utilisation/reward": 0}
    )
    assert watched.compute_utilisation(-1, 1) == {}
    assert watched.seconds == pytest.approx({"training": 5, "rollout": 10, "validation": 1})


def test_a_timeline_shows_the_last_steps_and_a_row_for_each_worker():
    spans = [
        Span("rollout", worker, "rollout", 10.0 * step, 10.0 * step + 5)
        for step in range(30)
        for worker in (0, 1)
    ]
    steps = {step: (10.0 * step, 10.0 * step + 10) for step in range(30)}
    one, both = (Image.open(io.BytesIO(plot_timeline(some, steps))) for some in (spans[::2], spans))
    assert one.width == both.width == 1200
    assert both.height > one.height
    orange = (
        np.abs(np.asarray(both.convert("RGB")).astype(int) - (0xE0, 0x79, 0x1A)).sum(2) < 20
    ).any(0)
    assert np.diff(orange.astype(int)).clip(0).sum() == 12 + 1, (
        "a bar for each of the last 12 steps, and the legend's"
    )
