"""The benchmark of the algorithms covers all of them, and reads its curves right."""

from __future__ import annotations

import json

import pytest
import yaml

from benchmarks import algorithms
from benchmarks.algorithms import (
    ENTRIES,
    LearningCurve,
    OutOfTimeError,
    add_run,
    build_recipe,
)
from benchmarks.algorithms_report import (
    BOTH_GOALS,
    OCR_GOAL,
    TITLES,
    interpolate_score,
    interpolate_seconds,
    write_report,
)
from ebbflow.recipe.registry import ALGORITHMS

GROUPS = yaml.safe_load(ENTRIES.read_text())
SETTINGS = {name: settings for group in GROUPS.values() for name, settings in group.items()}


def recipe(name):
    return build_recipe({"name": name, "seed": 3, "settings": SETTINGS[name]})


@pytest.mark.parametrize("name", SETTINGS)
def test_every_entry_is_a_stage_that_can_run(name):
    (stage,) = recipe(name).stages
    assert stage.kind == SETTINGS[name].get("kind", "online")
    assert recipe(name).seed == 3


def test_no_algorithm_is_without_an_entry_that_is_meant_to_learn():
    learning = {
        recipe(name).stages[0].algorithm_name
        for kind, group in GROUPS.items()
        if kind != "collapse"
        for name in group
    }
    assert learning == set(ALGORITHMS)


def test_every_group_has_a_title():
    assert set(GROUPS) == set(TITLES)


@pytest.mark.parametrize(
    ("scores", "seconds"),
    [
        ([0.5, 0.8, 1.0], 15.0),
        ([0.5, 0.6, 0.7], None),
        ([0.5, 0.9, 0.7], 10.0),
        ([0.5, 0.7, 0.95], 18.0),
        ([0.95, 0.97, 0.98], 0.0),
    ],
)
def test_the_goal_is_passed_between_two_evaluations(scores, seconds):
    curve = [{"cpu_seconds": 10.0 * number, "ocr": score} for number, score in enumerate(scores)]
    assert interpolate_seconds(curve, 0.9) == (None if seconds is None else pytest.approx(seconds))


def test_a_run_takes_the_place_of_the_one_of_its_entry_and_seed():
    order = ["crd", "awm"]
    results: dict = {"runs": []}
    for name, seed, steps in (("awm", 0, 1), ("crd", 1, 2), ("crd", 0, 3), ("crd", 1, 4)):
        results = add_run(results, {"name": name, "seed": seed, "steps": steps}, order)
    assert [run["steps"] for run in results["runs"]] == [3, 4, 1]
    machine = results["machine"]
    # An entry that is gone from the YAML leaves the results; the machine is that of the first runs.
    results = add_run(
        results | {"machine": machine | {"cpu": "first"}},
        {"name": "awm", "seed": 0, "steps": 5},
        ["awm"],
    )
    assert [run["steps"] for run in results["runs"]] == [5]
    assert results["machine"]["cpu"] == "first"


def test_evaluations_take_no_seconds_of_a_run(monkeypatch):
    clock = [100.0]

    def score(guardrails):
        clock[0] += 50
        return {"ocr": 0.5}

    monkeypatch.setattr(algorithms.time, "process_time", lambda: clock[0])
    curve = LearningCurve(score, cpu_seconds=4.0)
    curve.start({"ocr": 0.25})

    def train():
        for step in range(9):
            clock[0] += 1.5
            curve.log_step({"loss": 1.0}, step)

    with pytest.raises(OutOfTimeError):
        train()
    curve.finish({"ocr": 0.75})
    assert [metrics["cpu_seconds"] for metrics in curve.training] == [1.5, 3.0, 4.5]
    # At 1.5 seconds none is due; the one at 3.0 moves the next to 5.0.
    assert [(point["cpu_seconds"], point["steps"]) for point in curve.points] == [
        (0.0, 0),
        (3.0, 2),
        (4.5, 3),
    ]
    assert curve.points[-1]["ocr"] == 0.75


def test_the_other_reader_is_read_at_the_moment_of_the_goal():
    curve = [
        {"cpu_seconds": 0.0, "ocr": 0.5, "tesseract": 0.4},
        {"cpu_seconds": 10.0, "ocr": 0.8, "tesseract": 0.7},
        {"cpu_seconds": 20.0, "ocr": 1.0, "tesseract": 0.8},
        {"cpu_seconds": 30.0, "ocr": 0.95, "tesseract": 0.96},
    ]
    assert interpolate_score(curve, OCR_GOAL, "tesseract") == pytest.approx(0.75)
    # .80 to .96: three quarters of the way, in which the OCR stays above its goal
    assert interpolate_score(curve, BOTH_GOALS, "cpu_seconds") == pytest.approx(27.5)
    assert interpolate_score(curve[:3], BOTH_GOALS, "cpu_seconds") is None
    # both passed between the same two evaluations: the later one counts
    assert interpolate_score([curve[0], curve[3]], BOTH_GOALS, "cpu_seconds") == pytest.approx(
        max(0.4 / 0.45, 0.52 / 0.56) * 30
    )


def test_a_reader_that_was_not_asked_at_an_evaluation_has_no_score_there():
    curve = [
        {"cpu_seconds": 0.0, "ocr": 0.5, "tesseract": 0.4},
        {"cpu_seconds": 10.0, "ocr": 0.8},
        {"cpu_seconds": 20.0, "ocr": 1.0, "tesseract": 0.95},
    ]
    assert interpolate_score(curve, OCR_GOAL, "tesseract") is None
    assert interpolate_score(curve, BOTH_GOALS, "cpu_seconds") is None


def make_runs():
    """Runs of algorithms on two processors, with one seed or two."""
    point = {"cpu_seconds": 0.0, "ocr": 0.5}
    scores = {"ocr": 0.95, "exact_match": 0.8, "similarity": 0.7, "velocity_drift": 1.9}
    run = {
        "before": {"ocr": 0.5, "exact_match": 0.1},
        "after": scores,
        "cpu_seconds": 40,
        "steps": 7,
        "stopped": "",
        "alarms": [],
        "cpu": "x",
        "commit": "1a2b3c4",
    }
    curve = {"curve": [point, {"cpu_seconds": 40.0, "ocr": 0.95}]}
    runs = [
        run
        | curve
        | {
            "name": "crd",
            "kind": "forward_process",
            "seed": seed,
            "alarms": ["drift"] * seed,
        }
        for seed in (0, 1)
    ]
    runs.append(runs[0] | {"name": "tdm", "kind": "students", "teacher": scores | {"ocr": 0.875}})
    runs.append(runs[0] | {"name": "awm", "cpu": "y", "commit": "5d6e7f8"})
    readings = [point | {"tesseract": 0.25}, {"cpu_seconds": 40.0, "ocr": 0.95, "tesseract": 0.97}]
    runs.append(runs[0] | {"name": "dgpo", "curve": readings})
    # Neither the fastest, on another processor, nor the next, which one of its seeds alone has
    # reached, is the best policy gradient.
    for name, seconds, keys in (
        ("gardo", 5.0, {"cpu": "y"}),
        ("mix_grpo", 10.0, {}),
        ("mix_grpo", 10.0, {"curve": [point]}),
        ("flow_grpo", 20.0, {}),
    ):
        curve = {"curve": [point, {"cpu_seconds": seconds, "ocr": 0.95}]}
        runs.append(runs[0] | curve | {"name": name, "kind": "policy_gradient"} | keys)
    return runs


def test_the_report_is_made_of_the_results_alone(tmp_path):
    results = {"machine": {"cpu": "x", "cores": 2}, "runs": make_runs()}
    (tmp_path / "a.json").write_text(json.dumps(results))
    write_report(tmp_path / "a.json")
    page = (tmp_path / "a.md").read_text()
    assert (
        "| crd | 0.95 (0.95–0.95) | 0.80 (0.80–0.80) | – | 0.70 (0.70–0.70) | 1.90 | 36 | 2.00 | –"
        " | – | – | 7 | 1 of 2 |" in page
    )
    scores = "0.95 | 0.80 | – | 0.70 | 1.90"
    assert f"| flow_grpo | {scores} | 18 | 1.00 | – | – | – | 7 | 0 of 1 |" in page
    assert f"| gardo | {scores} | 4.4 | 1.00 | – | – | – | 7 | 0 of 1 |" in page
    assert "| 8.9 (1 of 2) | – | – | – | – | 7 | 0 of 2 |" in page
    # tesseract rises from .25 to .97 while the OCR rises from .5 to .95: .89 at the goal
    assert f"| dgpo | {scores} | 36 | 2.00 | 0.89 | 37 | 2.09 | 7 | 0 of 1 |" in page
    # on another processor it is a share of what gardo takes there
    assert f"| awm | {scores} | 36 | 8.00 | – | – | – | 7 | 0 of 1 |" in page
    assert "a fifth of what has passed (measured at 1a2b3c4, 5d6e7f8)." in page
    assert "On y, whose CPU-seconds are not those of the others: `gardo`, `awm`." in page
    assert "On x, whose" not in page
    assert "| teacher of tdm, evaluated alike | 0.88 | 0.80 | – | 0.70 | 1.90 |" in page
    assert "teacher of crd" not in page
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
