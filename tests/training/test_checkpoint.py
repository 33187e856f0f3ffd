"""Training that goes on from a checkpoint ends with the same bytes as training that never stopped."""

from __future__ import annotations

import json

import pytest
import torch

from ebbflow.artifacts import ArtifactError
from ebbflow.models import load_model
from ebbflow.stage import Place
from ebbflow.training.checkpoint import CheckpointError, newest_checkpoint, read_state, restore, write_checkpoint
from ebbflow.training.policy import Policy
from ebbflow.training.update import Learner

ABOUT = {"recipe": "abc", "stage": "1.1 online"}


@pytest.fixture
def start(make_recipe, base_folder):
    """``start(policy={...}, **online)``: a learner at the start of a stage, the same each time."""

    def learner(policy=None, **online):
        place = Place(make_recipe(online=online, policy=policy or {}), 0, 0)
        trained = Policy(load_model(base_folder), place.recipe.policy, 0)
        for name in ("old", "ema"):
            trained.ensure(name)
        return Learner(trained, place.online)

    return learner


def push(learner, count, seed):
    """Optimiser steps on made-up gradients."""
    draws = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for parameter in learner.policy.parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=draws)
        learner.optimizer.step()
        learner.updates += 1
        for name, decay in (("old", 0.5), ("ema", 0.9)):
            learner.policy.blend(name, decay)


def everything(learner):
    values = {"parameters": learner.policy.parameters, **learner.policy.copies}
    tensors = {f"{name}/{key}": value for name, copy in values.items() for key, value in copy.items()}
    for name, parameter in learner.policy.parameters.items():
        tensors |= {f"{name}/{key}": value for key, value in learner.optimizer.state[parameter].items()}
    return tensors


@pytest.mark.parametrize("policy", [{}, {"train": "lora", "rank": 2}], ids=["full", "lora"])
def test_everything_comes_back_to_the_bit_and_goes_on_alike(start, policy, tmp_path):
    through, first, second = (start(policy) for _ in range(3))
    push(through, 3, seed=1)
    push(first, 3, seed=1)
    first.steps, first.alarms, first.drifted = 2, ["velocity drift"], True
    write_checkpoint(tmp_path / "step-00002", first, ABOUT, {"samples": 16})
    assert read_state(tmp_path / "step-00002", ABOUT) == {"samples": 16}
    restore(tmp_path / "step-00002", second)
    assert (second.updates, second.steps, second.alarms, second.drifted) == (3, 2, ["velocity drift"], True)
    for learner in (through, second):
        push(learner, 2, seed=2)
    expected, found = everything(through), everything(second)
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_a_checkpoint_of_another_training_is_refused(start, tmp_path):
    write_checkpoint(tmp_path / "step-00001", start(), ABOUT, {})
    with pytest.raises(CheckpointError, match=r"recipe = 'abc' \(now 'xyz'\); remove it"):
        read_state(tmp_path / "step-00001", ABOUT | {"recipe": "xyz"})


def test_the_newest_whole_checkpoint_counts(start, tmp_path):
    assert newest_checkpoint(tmp_path) is None
    for step in (1, 2):
        write_checkpoint(tmp_path / f"step-0000{step}", start(), ABOUT, {})
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00002"
    (tmp_path / "step-00002" / "state.json").write_text(json.dumps({}))
    with pytest.warns(UserWarning, match="passed over.*step-00002.*state.json"):
        assert newest_checkpoint(tmp_path) == tmp_path / "step-00001"
    with pytest.raises(ArtifactError, match="step-00002"):
        read_state(tmp_path / "step-00002", ABOUT)


def test_a_rank_that_does_not_write_leaves_nothing(start, tmp_path):
    write_checkpoint(tmp_path / "step-00001", start(), ABOUT, {}, write=False)
    assert list(tmp_path.iterdir()) == []
