"""Reward models from labels of people."""

from __future__ import annotations

from flytekit import workflow

from ebbflow.recipe import Recipe
from tasks.train_reward_model import train_reward_model


@workflow
def train_reward(recipe: Recipe) -> Recipe:
    """Train the reward model of a recipe on labels of people, register and compare it; return the
    recipe with the versions and digests of its reward models.
    """
    return train_reward_model(recipe=recipe)
