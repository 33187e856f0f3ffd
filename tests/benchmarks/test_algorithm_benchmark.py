"""The benchmark of the algorithms covers all of them, and reads its curves right."""

from __future__ import annotations

import json

import pytest
import yaml

from benchmarks.algorithms import ENTRIES, build_recipe
from benchmarks.algorithms_report import TITLES, interpolate_seconds, write_report
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
    ],
)
def test_the_goal_is_passed_between_two_evaluations(scores, seconds):
    curve = [{"cpu_seconds": 10.0 * number, "ocr": score} for number, score in enumerate(scores)]
    assert interpolate_seconds(curve, 0.9) == (pytest.approx(seconds) if seconds else None)


def test_the_report_is_made_of_the_results_alone(tmp_path):
    point = {"cpu_seconds": 0.0, "ocr": 0.5}
    scores = {"ocr": 0.95, "exact_match": 0.8, "similarity": 0.7, "velocity_drift": 1.9}
    run = {
        "before": {"ocr": 0.5, "exact_match": 0.1},
        "after": scores,
        "cpu_seconds": 40,
        "steps": 7,
        "stopped": "",
        "alarms": [],
        "evaluate_every": 4.0,
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
    runs.append(
        {key: value for key, value in runs[0].items() if key != "evaluate_every"} | {"name": "awm"}
    )
    runs[1]["cpu"] = "x"
    runs[3]["cpu"] = "y"
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
    (tmp_path / "a.json").write_text(
        json.dumps({"machine": {"cpu": "x", "cores": 2}, "runs": runs})
    )
    write_report(tmp_path / "a.json")
    page = (tmp_path / "a.md").read_text()
    assert (
        "| crd | 0.95 (0.95–0.95) | 0.80 (0.80–0.80) | – | 0.70 (0.70–0.70) | 1.90 | 36 | 2.00 | 7"
        " | 1 of 2 |" in page
    )
    assert "| flow_grpo | 0.95 | 0.80 | – | 0.70 | 1.90 | 18 | 1.00 | 7 | 0 of 1 |" in page
    assert "| gardo | 0.95 | 0.80 | – | 0.70 | 1.90 | 4 | – | 7 | 0 of 1 |" in page
    assert "| 9 (1 of 2) | – | 7 | 0 of 2 |" in page
    assert "| awm ° | 0.95 |" in page
    assert "On y, whose CPU-seconds are not those of the others: `gardo`, `awm`." in page
    assert "On x, whose" not in page
    assert (
        "| teacher of tdm, evaluated alike | 0.88 | 0.80 | – | 0.70 | 1.90 | – | – | – | – |"
        in page
    )
    assert "teacher of crd" not in page
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
