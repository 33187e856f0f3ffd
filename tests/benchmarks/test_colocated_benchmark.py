"""The page of the benchmark of colocated processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.colocated import (
    ALONE,
    COLOCATED,
    IMAGES_PER_STEP,
    SIDE_BY_SIDE,
    WARM_UP,
    WAYS,
    Measurement,
    format_page,
    measure_timelines,
)


def test_the_page_has_the_median_of_the_ratios_of_the_turns() -> None:
    seconds = {"rollout": 0.2, "scoring": 0.1, "training": 0.6}
    # The median of the ratios (2, 1.6, 1.5) is not the ratio of the medians (1.67).
    rates = [(100, 200), (125, 200), (120, 180)]
    turns = []
    for alone, colocated in rates:
        turn = {way: Measurement(50.0, seconds, 1.0) for way in WAYS}
        turn[ALONE] = Measurement(alone, seconds, 1.0)
        turn[COLOCATED] = Measurement(colocated, seconds, 1.0)
        turn[SIDE_BY_SIDE] = Measurement(200.0, seconds, 1.0)
        turns.append(turn)
    page = format_page(turns, 0.5, "a command")
    row = f"| {COLOCATED}: {WAYS[COLOCATED]} | 200.0 | 1.60 (1.50 to 2.00) | 1.00 (0.90 to 1.00) |"
    assert row in page
    assert f"| {COLOCATED} | 1000 | 200 | 100 | 600 | 100 |" in page
    assert "| ray, sync | 1000 | 200 | 100 | 600 |  |" in page
    assert "a load of 0.5 before" in page


def test_a_measurement_is_of_the_steps_after_the_warm_up(tmp_path: Path) -> None:
    """Two ranks in one timeline, then two timelines of stages that ran at the same time."""
    steps = [{"step": step, "start": 2.0 * step, "end": 2.0 * step + 2} for step in range(8)]
    spans = [
        {"worker": worker, "task": "rollout", "step": step, "start": 0.0, "end": length}
        for step in range(8)
        for worker, length in ((0, 0.5), (1, 0.7))
    ]
    steps[0]["end"] += 100
    spans[0]["end"] += 100
    assert WARM_UP > 0
    timeline = tmp_path / "timeline.json"
    timeline.write_text(json.dumps({"steps": steps, "spans": spans}))
    alone = measure_timelines([timeline])
    assert alone.rate == pytest.approx(IMAGES_PER_STEP / 2)
    assert alone.seconds == pytest.approx({"rollout": 0.6, "scoring": 0, "training": 0})
    assert measure_timelines([timeline, timeline]).rate == pytest.approx(IMAGES_PER_STEP)
