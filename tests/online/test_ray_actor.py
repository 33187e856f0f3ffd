"""What actors of a stage on Ray load."""

from __future__ import annotations

import pytest

from ebbflow.online.ray_actor import load_reward_gradients
from ebbflow.stage import StageContext
from tests.conftest import Darkness


class OnlyScores(Darkness):
    name = "only_scores"

    def __init__(self):
        pytest.fail("a network that only scores is loaded where the policy is trained")


@pytest.mark.parametrize(("algorithm", "columns"), [("draft", {"Darkness"}), ("flow_grpo", None)])
def test_a_training_rank_loads_the_rewards_with_a_gradient_alone(make_recipe, algorithm, columns):
    rewards = [
        {"name": "custom", "path": "tests.conftest:Darkness"},
        {"name": "custom", "path": f"{__name__}:OnlyScores", "weight": 0},
    ]
    recipe = make_recipe(online={"algorithm": {"name": algorithm}}, rewards=rewards)
    scorer = load_reward_gradients(StageContext(recipe, 0, 0))
    assert (scorer and set(scorer.reward_weights)) == columns
