"""The benchmark of the algorithms covers all of them, and reads its curves right."""

from __future__ import annotations

import json

import pytest
import yaml

from benchmarks.algorithms import ENTRIES, build_recipe, identify_run
from benchmarks.algorithms_report import (
    BOTH_GOALS,
    OCR_GOAL,
    SPLIT_OF_SEED,
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


def test_a_run_on_other_held_out_prompts_takes_no_place_of_one_that_is_there():
    older_run = {"name": "crd", "seed": 1, "cpu_seconds": 45.0}
    newer_run = older_run | {"split": SPLIT_OF_SEED}
    assert identify_run(older_run) != identify_run(newer_run)
    assert identify_run(newer_run) == identify_run(newer_run | {"cpu_seconds": 20.0})
    assert identify_run(newer_run) != identify_run(newer_run | {"seed": 2})


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
        "split": SPLIT_OF_SEED,
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
    newer = {"evaluate_every", "split", "commit"}
    older_run = {key: value for key, value in runs[0].items() if key not in newer}
    runs.append(older_run | {"name": "awm"})
    runs[1]["cpu"] = "x"
    runs[3]["cpu"] = "y"
    # The same entry, measured on strings that each seed has of its own and before: two rows.
    readings = [point | {"tesseract": 0.25}, {"cpu_seconds": 40.0, "ocr": 0.95, "tesseract": 0.97}]
    runs.append(runs[0] | {"name": "dgpo", "curve": readings})
    runs.append(older_run | {"name": "dgpo", "evaluate_every": 4.0, "cpu": "x"})
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
        "| crd | 0.95 (0.95–0.95) | 0.80 (0.80–0.80) | – | 0.70 (0.70–0.70) | 1.90 | 36 | 2.00 | –"
        " | – | – | 7 | 1 of 2 |" in page
    )
    scores = "0.95 | 0.80 | – | 0.70 | 1.90"
    assert f"| flow_grpo | {scores} | 18 | 1.00 | – | – | – | 7 | 0 of 1 |" in page
    assert f"| gardo | {scores} | 4.4 | 1.00 | – | – | – | 7 | 0 of 1 |" in page
    assert "| 8.9 (1 of 2) | – | – | – | – | 7 | 0 of 2 |" in page
    # tesseract rises from .25 to .97 while the OCR rises from .5 to .95: .89 at the goal
    assert f"| dgpo | {scores} | 36 | 2.00 | 0.89 | 37 | 2.09 | 7 | 0 of 1 |" in page
    # of an older row the goal's seconds are known, and no policy gradient was measured like it
    assert f"| dgpo † | {scores} | 36 | – | – | – | – | 7 | 0 of 1 |" in page
    assert "a fifth of what has passed (measured at 1a2b3c4)." in page
    assert "| awm †° | 0.95 |" in page
    assert "On y, whose CPU-seconds are not those of the others: `gardo`, `awm †°`." in page
    assert "On x, whose" not in page
    assert "of the policy gradients: `gardo`, `mix_grpo`, `flow_grpo`." in page
    assert "| teacher of tdm, evaluated alike | 0.88 | 0.80 | – | 0.70 | 1.90 |" in page
    assert "teacher of crd" not in page
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
