"""Training that goes on from a checkpoint ends with the same bytes as training that never
stopped."""

from __future__ import annotations

import re
import shutil

import pytest
import torch

from ebbflow.models import load_model
from ebbflow.stage import StageContext
from ebbflow.storage.artifacts import write_new_folder
from ebbflow.training.checkpoint import CheckpointError, Checkpoints, restore_updater, write_part
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater


@pytest.fixture
def start(make_recipe, base_folder):
    """``start(policy={...}, **online)``: an updater at the start of a stage, the same each time."""

    def updater(policy=None, **online):
        ctx = StageContext(make_recipe(online=online, policy=policy or {}), 0, 0)
        trained = Policy(load_model(base_folder), ctx.recipe.policy, 0)
        for name in ("old", "sampling", "ema"):
            trained.ensure_copy(name)
        return PolicyUpdater(trained, ctx.online_config)

    return updater


@pytest.fixture
def checkpoints(make_recipe, tmp_path):
    """``checkpoints(**online)``: those of a stage, in the same folder each time."""
    return lambda **online: Checkpoints(
        StageContext(make_recipe(online=online), 0, 0), tmp_path / "kept"
    )


def push(updater, count, seed):
    """Optimiser steps on made-up gradients."""
    draws = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for parameter in updater.policy.parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=draws)
        updater.optimizer.step()
        updater.updates += 1
        for name, decay in (("old", 0.5), ("sampling", 0.2), ("ema", 0.9)):
            updater.policy.blend_copy(name, decay)


def everything(updater):
    values = {"parameters": updater.policy.parameters, **updater.policy.copies}
    tensors = {
        f"{name}/{key}": value for name, copy in values.items() for key, value in copy.items()
    }
    for name, parameter in updater.policy.parameters.items():
        tensors |= {
            f"{name}/{key}": value for key, value in updater.optimizer.state[parameter].items()
        }
    return tensors


@pytest.mark.any_cpu
@pytest.mark.parametrize("policy", [{}, {"train": "lora", "rank": 2}], ids=["full", "lora"])
def test_everything_comes_back_to_the_bit_and_goes_on_alike(start, checkpoints, policy):
    through, first, second = (start(policy) for _ in range(3))
    push(through, 3, seed=1)
    push(first, 3, seed=1)
    first.steps = 2
    first.alarms = ["velocity drift"]
    first.drift = 0.5
    first.drifted = True
    with checkpoints().save_step(2, {"samples": 16}) as folder:
        write_part(folder, first)
    folder, state = checkpoints().find_newest()
    assert state == {"samples": 16}
    restore_updater(folder, second)
    counted = (second.updates, second.steps, second.alarms, second.drift, second.drifted)
    assert counted == (3, 2, ["velocity drift"], 0.5, True)
    for updater in (through, second):
        push(updater, 2, seed=2)
    expected = everything(through)
    found = everything(second)
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def save(checkpoints, step, score=None):
    with checkpoints.save_step(step, {"done": step}, score) as folder:
        (folder / "part").write_text("weights")


def test_a_checkpoint_of_another_training_is_refused(checkpoints):
    save(checkpoints(), 1)
    with pytest.raises(CheckpointError, match=r"recipe = '\w+' \(now '\w+'\); remove it"):
        checkpoints(steps=7).find_newest()


def test_the_newest_whole_checkpoint_counts(checkpoints, tmp_path, caplog):
    assert checkpoints().find_newest() is None
    for step in (99_999, 100_000):
        save(checkpoints(), step)
    assert checkpoints().find_newest()[1] == {"done": 100_000}
    (tmp_path / "kept" / "step-100000" / "state.json").write_text("{")
    assert checkpoints().find_newest()[1] == {"done": 99_999}
    assert re.search("passed over.*step-100000.*state.json", caplog.text)


def there(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


@pytest.mark.parametrize(("keep", "expected"), [(1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_the_last_ones_are_kept(checkpoints, tmp_path, keep, expected):
    for step in (1, 2, 3, 4):
        save(checkpoints(checkpoints={"keep": keep}), step)
    assert there(tmp_path / "kept") == expected


def test_the_best_one_is_kept_beside_them(checkpoints, tmp_path):
    stage = checkpoints(checkpoints={"keep": 1})
    assert stage.find_best() is None
    for step, score in ((1, 0.2), (2, 0.9), (3, None), (4, 0.9), (5, 0.3)):
        save(stage, step, score)
    assert there(tmp_path / "kept") == [2, 5]
    assert stage.find_best() == (tmp_path / "kept" / "step-00002", 2, 0.9)


def test_what_was_passed_over_goes_and_never_the_new_one(checkpoints, tmp_path, caplog):
    stage = checkpoints(checkpoints={"keep": 1})
    save(stage, 20)
    save(checkpoints(checkpoints={"keep": 9}), 30)
    (tmp_path / "kept" / "step-00030" / "part").write_text("cut o")
    assert stage.find_newest()[1] == {"done": 20}
    assert re.search("passed over.*step-00030", caplog.text)
    save(stage, 20)
    assert there(tmp_path / "kept") == [20]


def test_a_damaged_one_is_saved_again(checkpoints, tmp_path):
    save(checkpoints(), 20)
    (tmp_path / "kept" / "step-00020" / "part").write_text("cut o")
    save(checkpoints(), 20)
    assert checkpoints().find_newest()[1] == {"done": 20}


def test_the_best_one_is_whole(checkpoints, tmp_path, caplog):
    for step, score in ((1, 0.5), (2, 0.9)):
        save(checkpoints(), step, score)
    (tmp_path / "kept" / "step-00002" / "part").write_text("weights with a flipped bit")
    assert checkpoints().find_best().step == 1
    assert re.search("passed over.*step-00002", caplog.text)


DAMAGED = [
    '{"score": 99.0}',
    '{"score": "high"}',
    '{"score": NaN}',
    "[]",
    "null",
    "{",
    "[" * 100_000,
]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_state_of_an_older_one_is_never_the_best(checkpoints, tmp_path, content, caplog):
    stage, all_kept = (checkpoints(checkpoints={"keep": count}) for count in (1, 9))
    for step, score in ((1, 0.5), (2, 0.1)):
        save(all_kept, step, score)
    (tmp_path / "kept" / "step-00002" / "state.json").write_text(content)
    save(stage, 3, 0.2)
    assert there(tmp_path / "kept") == [1, 3]
    assert stage.find_best().step == 1
    assert stage.find_newest()[1] == {"done": 3}
    assert re.search(r"step-00002.state\.json is damaged: what it says is not used", caplog.text)


@pytest.mark.parametrize("content", DAMAGED)
def test_a_state_of_another_version_is_named(checkpoints, tmp_path, content):
    with write_new_folder(tmp_path / "kept" / "step-00001") as unfinished:
        (unfinished / "state.json").write_text(content)
    with pytest.raises(
        CheckpointError, match=r"step-00001/state\.json is damaged, or of another version.*; remove"
    ):
        checkpoints().find_newest()


def test_what_lies_beside_checkpoints_is_left_alone(checkpoints, tmp_path):
    kept = tmp_path / "kept"
    save(checkpoints(), 2, 0.5)
    others = {"step-00002.bak", "step-", "step-2", "step-²", "step--0001", "notes"}
    for name in others:
        shutil.copytree(kept / "step-00002", kept / name)
    (kept / "step-00009").write_text("a file")
    assert checkpoints().find_newest()[0] == checkpoints().find_best().folder == kept / "step-00002"
    save(checkpoints(checkpoints={"keep": 1}), 3, 0.9)
    assert {path.name for path in kept.iterdir()} == others | {"step-00003", "step-00009"}


@pytest.mark.parametrize(("every", "due"), [(2, [2, 4]), (3, [3])])
def test_they_are_due_every_so_many_steps(checkpoints, every, due):
    assert [
        step for step in range(1, 6) if checkpoints(checkpoints={"every": every}).is_due(step)
    ] == due


def test_none_is_due_where_none_is_wanted(checkpoints):
    assert not checkpoints(checkpoints=None).is_due(10)
