"""Estimates of memory at published sizes, against a count of the tensors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import memory_count
from ebbflow.recipe import load_recipe

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/memory_count.md"
CASES = [
    pytest.param(name, marks=[] if name == "SD3.5-medium" else pytest.mark.exhaustive)
    for name in memory_count.MODELS
]


@pytest.mark.parametrize("name", CASES)
def test_estimates_are_within_a_tenth_of_the_count(name):
    recipe = load_recipe(memory_count.RECIPES / f"{memory_count.MODELS[name]}.yaml")
    estimated = memory_count.estimate_phases(recipe)
    counted = dict(memory_count.count_phases(recipe))
    assert set(counted) == set(estimated)
    ratios = {phase: estimated[phase] / counted[phase] for phase in counted}
    assert all(0.9 <= ratio <= 1.1 for ratio in ratios.values()), ratios
    for phase in counted:
        row = (
            f"| {name} | {phase} | {counted[phase] / 2**30:.1f} | {estimated[phase] / 2**30:.1f} |"
        )
        assert row in RESULTS.read_text(), "python -m benchmarks.memory_count --write"


def test_the_page_has_every_model():
    rows = re.findall(r"^\| ([\w.-]+) \| training \|", RESULTS.read_text(), re.MULTILINE)
    assert rows == list(memory_count.MODELS)
