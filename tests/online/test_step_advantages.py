"""Advantages that a user's own algorithm reshapes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from ebbflow.algorithms.advantages import PromptStatistics
from ebbflow.algorithms.base import Algorithm
from ebbflow.online.step_advantages import compute_step_advantages, reshape_step_advantages
from ebbflow.recipe.algorithms import ForwardConfig, TrajectoryConfig
from ebbflow.rewards.combine import ScoreTable
from ebbflow.stage import StageContext
from ebbflow.training.passes import TrainingError


def free_the_first(advantages, scores, config, memory):
    factor = np.ones(len(advantages.values), np.float32)
    factor[0] = 0
    return replace(advantages, penalty_factor=factor)


class OfTrajectories(TrajectoryConfig):
    reshapes_advantages = True


class OfForward(ForwardConfig):
    stages = ("online",)
    reshapes_advantages = True


TRAJECTORIES = Algorithm(OfTrajectories, lambda rows, config: (None, {}), reshape=free_the_first)
FORWARD = Algorithm(OfForward, lambda rows, config: (None, {}), reshape=free_the_first)


def compute_with(make_recipe, name):
    algorithm = {"name": "custom", "path": f"{__name__}:{name}"}
    ctx = StageContext(make_recipe(online={"algorithm": algorithm}), 0, 0)
    columns = {"darkness": np.array([1.0, 2.0, 4.0])}
    batch = SimpleNamespace(
        prompt_ids=np.zeros(3, int),
        scores=ScoreTable(columns["darkness"], columns, [None] * 3),
        tree_nodes=None,
    )
    advantages = compute_step_advantages(ctx, batch, {"darkness": 1.0}, PromptStatistics(), {})
    return reshape_step_advantages(ctx, batch, advantages, {})


def test_the_reference_penalty_is_gated_on_trajectories_alone(make_recipe):
    assert compute_with(make_recipe, "TRAJECTORIES").penalty_factor.tolist() == [0, 1, 1]
    with pytest.raises(TrainingError, match=r"FORWARD returned a penalty_factor.*TrajectoryConfig"):
        compute_with(make_recipe, "FORWARD")
