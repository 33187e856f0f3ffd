"""Recipes for tests, and what is wrong with one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbflow.recipe import Recipe, RecipeError

SHIPPED = sorted((Path(__file__).parents[2] / "workflows" / "recipes").glob("*.yaml"))


def problem(data):
    """What is wrong with a recipe, in its own words."""
    with pytest.raises(RecipeError) as error:
        Recipe.model_validate(data)
    return str(error.value)


def one_stage(**stage):
    return {"stages": [stage]}


WRITTEN = {
    "name": "x",
    "seed": 4,
    "stages": [
        {"kind": "online", "steps": 3, "optimizer": {"lr": 1e-4, "weight_decay": 0.1}},
        {"kind": "offline"},
    ],
    "rewards": [{"name": "ocr", "weight": 2}, {"name": "similarity"}],
    "guardrails": [],
}
