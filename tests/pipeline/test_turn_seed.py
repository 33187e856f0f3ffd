"""The seed that a turn of the flywheel trains with."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

import ebbflow.launch
import ebbflow.reward_training.run
import tasks.train_reward_model
from ebbflow.recipe import Recipe
from ebbflow.registry.reward_models import RewardModelVersion
from ebbflow.reward_training.decide import RewardModelDecision
from ebbflow.reward_training.folder import RewardModelRecord
from ebbflow.reward_training.run import TrainedRewardModel
from tasks.train_reward_model import train_reward_model

RECIPE = Recipe.model_validate({"seed": 5, "reward_model": {"labels": ["labels"]}})
VERSION = cast(RewardModelVersion, None)


@pytest.mark.parametrize("promoted", [True, False])
def test_a_later_turn_has_a_seed_of_its_own_whatever_the_gate_decides(
    monkeypatch: pytest.MonkeyPatch, promoted: bool
) -> None:
    def train(compared_with: str | None, labels: str) -> Recipe:
        record = RewardModelRecord.model_construct(
            compared_with=compared_with,
            labels_digest=labels,
            decision=RewardModelDecision.model_construct(
                promote=promoted or compared_with is None, reasons=[]
            ),
        )
        trained = TrainedRewardModel(VERSION, record, Path("unused"))
        monkeypatch.setattr(
            ebbflow.reward_training.run, "train_and_register", lambda recipe: trained
        )
        return cast(Recipe, train_reward_model.task_function(recipe=RECIPE))

    monkeypatch.setattr(tasks.train_reward_model, "fetch_labels", lambda source: source)
    monkeypatch.setattr(ebbflow.launch, "pin_rewards", lambda recipe: recipe)
    first = train(None, "a")
    second = train("1", "b")
    third = train("1", "c")
    assert first == RECIPE
    assert len({first.seed, second.seed, third.seed}) == 3
    # Nothing else differs, so that the recipe is the one of the turn before but for its noise.
    assert second.model_copy(update={"seed": 5}) == RECIPE
