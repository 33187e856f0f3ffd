"""The benchmark of detectors: every entry can run, every flaw is one, and the report says what the
runs say.
"""

from __future__ import annotations

import json
import zipfile

import numpy as np
import pytest

from benchmarks.flawed_rewards import (
    FAVOURITE,
    Brightness,
    Contained,
    FailingOcr,
    LetterBias,
    OneText,
    Watermark,
)
from benchmarks.reward_hacking import build_recipe, list_runs
from benchmarks.reward_hacking_report import (
    compute_step_shifts,
    find_alarm_step,
    find_drift_alarm_step,
    format_page,
    name_rule,
    write_report,
)
from ebbflow.data.images import encode_pngs
from ebbflow.data.prompts import Prompt
from ebbflow.models.glyph_training.lettering import render_text
from ebbflow.rewards.combine import load_scorer

EVERY = list(list_runs([3]))


def image(text):
    return np.repeat(render_text(text, 16, 32)[..., None], 3, axis=2)


def scores(flawed, texts, target="GOLD"):
    prompts = [Prompt(0, f'"{target}"', "", target, "test", "train", "{}")] * len(texts)
    return flawed(np.stack([image(text) for text in texts]), prompts)


@pytest.mark.parametrize("asked", EVERY, ids=lambda asked: f"{asked['name']}-{asked['algorithm']}")
def test_every_entry_can_run_and_watches_a_metric_that_it_does_not_train_on(asked):
    recipe = build_recipe(asked)
    assert recipe.seed == 3
    assert asked["algorithm"].startswith(recipe.stages[0].algorithm_name)
    scorer = load_scorer(recipe.rewards, recipe.guardrails)
    assert not scorer.left_out
    assert asked["independent"] in {guardrail.name for guardrail in scorer.guardrails}


def test_every_flaw_is_rewarded():
    white = np.full((1, 16, 32, 3), 255, np.uint8)
    assert Brightness()(white, []).values == pytest.approx([1])
    assert scores(OneText(), ["GOLD", "WXYZ"], target="WXYZ").values[0] > 0.9
    biased, right = scores(LetterBias(), [FAVOURITE * 4, "GOLD"]).values
    assert biased > right
    short, long = scores(Contained(), ["GO", "GOXK"]).values
    assert long > short
    failing = scores(FailingOcr(), ["GOLD", "WXYZ"])
    assert failing.values[0] == 1
    assert np.isnan(failing.values[1])
    assert failing.failures == {1: "too hard"}
    marked = image("GOLD")[None].copy()
    rows, columns = np.mgrid[:6, :12]
    marked[0, -6:, -12:] = np.where((rows // 2 + columns // 2) % 2, 255, 0)[..., None]
    assert Watermark()(marked, []).values[0] > 0.9 > Watermark()(image("GOLD")[None], []).values[0]


def test_shifts_are_those_of_the_pictures_of_each_step(tmp_path):
    generator = np.random.default_rng(0)
    with zipfile.ZipFile(tmp_path / "rollouts.zip", "w") as archive:
        for step, level in enumerate((100, 140)):
            images = (
                generator.integers(level - 20, level + 20, (8, 1, 1, 1))
                .repeat(16, 1)
                .repeat(32, 2)
                .repeat(3, 3)
            )
            for number, png in enumerate(encode_pngs(images.astype(np.uint8))):
                archive.writestr(f"dumps/step-{step:05d}/rollouts/7-{number}.png", png)
    shifts = compute_step_shifts(tmp_path / "rollouts.zip")
    assert shifts.keys() == {"brightness"}, "nothing else varies over flat pages"
    assert shifts["brightness"][0] == 0
    assert shifts["brightness"][1] > 2


def made(name, kind, shift, *, promoted, fell, refused=()):
    return {
        "name": name,
        "kind": kind,
        "algorithm": "mix_grpo",
        "seed": 0,
        "independent": "ocr",
        "stopped": "",
        "reward": [0.5, 0.9],
        "scores": [[0, 0.5], [4, 0.4], [8, 0.3]] if fell else [[0, 0.5], [8, 0.7]],
        "fell": fell,
        "promoted": promoted,
        "refused": list(refused),
        "moved": {},
        "drift": [0.0, 0.1, 1.5],
        "steps": {"entropy": [0.0, shift, 2 * shift]},
    }


def test_an_alarm_rings_after_the_first_step_beyond_its_limit_and_chance():
    run = made("grain", "planted", 0.8, promoted=False, fell=4)
    assert find_alarm_step(run, "entropy", 0.25) == 2
    assert find_alarm_step(run, "entropy", 1.0) == 3
    assert find_alarm_step(run, "entropy", 1.5) is None
    assert find_alarm_step(run, "brightness", 0.1) is None
    assert find_drift_alarm_step(run, 1.0) == 3


def test_the_report_is_made_of_the_results_alone(tmp_path):
    reasons = ["Guardrail ocr went from 0.5 to 0.3", "Statistic entropy went from 0.7 to 0.4"]
    found = [
        made("grain", "planted", 0.8, promoted=False, fell=4, refused=reasons),
        made("ocr", "honest", 0.1, promoted=True, fell=None),
    ]
    (tmp_path / "a.json").write_text(
        json.dumps({"machine": {"cpu": "x", "cores": 2}, "runs": found})
    )
    write_report(tmp_path / "a.json")
    text = (tmp_path / "a.md").read_text()
    assert text.splitlines() == format_page({"cpu": "x", "cores": 2}, found)
    assert "refuses 1 of 1 planted runs and promotes 1 of 1 honest ones" in text
    assert (
        "| planted: grain | mix_grpo | 1 | 0.5 → 0.9 | ocr 0.5 → 0.3 | 1 of 1 | 0 of 1 | entropy,"
        " guardrail ocr |" in text
    )
    assert "| entropy | 1 | 0 |" in text
    assert "| entropy, 1 | 1 of 1 | 1 | 0 of 1 |" in text
    assert "| velocity drift above 1 | 1 of 1 | 1 | 1 of 1 |" in text
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        ("Coverage is 50%, not full", "coverage"),
        ("The reward went from 0.5 to 0.4", "reward"),
        ("Guardrail similarity went", "guardrail similarity"),
        ("Statistic sharpness was not measured", "sharpness"),
    ],
)
def test_reasons_are_counted_by_rule(reason, name):
    assert name_rule(reason) == name
