"""Stages for tests, as a recipe has them, and what is wrong with one."""

from __future__ import annotations

import pytest

from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.registry import ALGORITHMS

BYPASS = {"mode": "bypass", "weights": "none"}
CONFIGS = ALGORITHMS
TRAJECTORY = [name for name, config in CONFIGS.items() if config.kind == "trajectory"]
FORWARD = [name for name, config in CONFIGS.items() if config.kind == "forward"]
GRADIENT = [
    name
    for name, config in CONFIGS.items()
    if config.kind in ("gradient", "reward_gradient", "direct_align")
]
STOCHASTIC = ["flow_sde", "dance_sde", "cps"]


NEEDS = {
    "distillation": {"teacher": "elsewhere"},
    "gardo": {"auxiliary": ["exact_match"], "diversity": None},
}


def keys_of(name, **rest):
    """The recipe's keys of an algorithm, with those that it cannot do without."""
    return {"name": name, **NEEDS.get(name, {}), **rest}


def online(name="mix_grpo", **stage):
    return {"kind": "online", "algorithm": keys_of(name), **stage}


def offline(name="diffusion_nft", **stage):
    return {"kind": "offline", "algorithm": keys_of(name), **stage}


GUIDED = {"family": "sd3", "path": "base"}
"""A model with classifier-free guidance, for the published reference of CRD."""


def resolved(stage):
    return Recipe.model_validate({"model": GUIDED, "stages": [stage]}).stages[0]


def problem(stage):
    """What is wrong with a stage, in the recipe's own words."""
    with pytest.raises(RecipeError) as error:
        resolved(stage)
    return str(error.value)
