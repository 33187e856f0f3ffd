"""The policy whose pictures people label before the first turn."""

from __future__ import annotations

import pytest

from ebbflow.data.local_prompts import prepare_local_prompts
from ebbflow.models import load_model
from ebbflow.recipe import Recipe
from ebbflow.reward_training import queue as queues
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import PolicyMetadata
from tests.parameters import move, same, values


@pytest.fixture
def trained(base_folder, tmp_path):
    """A policy that was trained before, and its folder."""
    recipe = Recipe(policy={"train": "full"})
    policy = Policy(load_model(base_folder), recipe.policy, seed=0)
    move(policy)
    metadata = PolicyMetadata(
        base_digest=verify_folder(base_folder),
        recipe_digest=recipe.digest,
        config=recipe.policy,
        version=7,
    )
    policy.save_folder(tmp_path / "trained", metadata)
    return policy, tmp_path / "trained"


def test_pictures_of_an_earlier_policy_are_labelled_where_the_run_starts_from_one(
    base_folder, trained, tmp_path
):
    policy, source = trained
    fine_tuning = {
        "kind": "offline",
        "only_from_base": True,
        "algorithm": {"name": "sft"},
        "data": {"path": "no pictures: the run skips this stage too"},
    }
    recipe = Recipe.model_validate(
        {
            "output": str(tmp_path / "runs"),
            "model": {"path": str(base_folder)},
            "policy": {"train": "full", "start": {"path": str(source)}},
            "stages": [fine_tuning, {"kind": "online"}],
        }
    )
    folder = tmp_path / "queue"
    folder.mkdir()
    base, labelled = queues._prepare_start(recipe, prepare_local_prompts(recipe), folder)
    _, served = queues.open_served_policy(recipe, base, labelled)
    assert same(values(served), values(policy))


def test_what_a_killed_generation_left_is_not_used_after_the_recipe_changed(
    base_folder, tmp_path, monkeypatch
):
    prepared = []
    monkeypatch.setattr(
        queues, "_prepare_start", lambda recipe, table, folder: stop_generation(prepared, folder)
    )
    recipe = Recipe.model_validate(
        {
            "output": str(tmp_path),
            "model": {"path": str(base_folder)},
            "reward_model": {
                "name": "taste",
                "labels": ["labels"],
                "network": {"name": "glyph_reader"},
            },
        }
    )
    for changed in (recipe, recipe, recipe.model_copy(update={"seed": 1})):
        with pytest.raises(InterruptedError):
            queues.open_queue(changed)
    assert prepared[0] == prepared[1] != prepared[2]
    assert all(folder.is_dir() for folder in prepared)


def stop_generation(prepared, folder):
    """Note the folder of a generation's models, and stop it as a kill would."""
    prepared.append(folder)
    raise InterruptedError
