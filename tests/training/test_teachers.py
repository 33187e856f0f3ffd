"""The copies that a policy learns from or is held to: a teacher, and a reference that is reset."""

from __future__ import annotations

import pytest
import torch
from training_cases import (
    BOTH,
    FULL,
    LORA,
    NFT,
    average_policy,
    farthest,
    forward_rows,
    sgd,
    take_steps,
    train,
    updater_of,
)

from ebbflow.data.records import StageRecord
from ebbflow.models import load_model
from ebbflow.recipe.model import ModelConfig
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training.policy import Policy
from ebbflow.training.policy_io import open_policy, save_policy
from ebbflow.training.policy_metadata import PolicyError, PolicyMetadata
from ebbflow.training.update import PolicyUpdater
from tests.parameters import move, same, values


@BOTH
def test_a_teacher_is_what_its_folder_serves(base_folder, model, start, ctx, tmp_path, config):
    teacher = Policy(model, average_policy(config), 0)
    move(teacher)
    teacher.snapshot_copy("ema")
    move(teacher, seed=1)
    base = verify_folder(base_folder)
    metadata = PolicyMetadata(
        base_digest=base,
        recipe_digest="r",
        config=average_policy(config),
        version=9,
        copies=("iterate",),
    )
    teacher.save_folder(tmp_path / "teacher", metadata)
    stage = ctx(
        average_policy(config), online={"algorithm": {"name": "distillation", "teacher": "x"}}
    )
    policy, _ = open_policy(
        stage,
        load_model(base_folder),
        start(average_policy(config)),
        teachers={"teacher": tmp_path / "teacher"},
    )
    assert same(policy.copies["teacher"], teacher.copies["ema"])
    assert same(values(policy), policy.copies["reference"])
    assert "iterate" not in policy.copies


@BOTH
def test_a_teacher_that_the_stage_starts_from_is_what_was_evaluated(
    base_folder, start, ctx, tmp_path, config
):
    config = average_policy(config)
    _, average = train(ctx(config), base_folder, start(config), tmp_path / "trained", 3)
    student = ctx(config, online={"algorithm": {"name": "dmd2"}, "sampler": {"steps": 2}})
    policy, _ = open_policy(student, load_model(base_folder), tmp_path / "trained")
    assert same(policy.copies["teacher"], average)
    assert same(policy.copies["fake"], values(policy))
    assert farthest(values(policy), average) > 1e-4


@pytest.mark.parametrize(
    "other",
    [{"base_digest": "another"}, {"model": ModelConfig(family="mine.models:load", path="base")}],
)
def test_a_teacher_of_another_base_is_refused(base_folder, model, start, ctx, tmp_path, other):
    mine = {
        "base_digest": verify_folder(base_folder),
        "recipe_digest": "r",
        "config": FULL,
        "version": 1,
    }
    Policy(model, FULL, 0).save_folder(tmp_path / "teacher", PolicyMetadata(**(mine | other)))
    stage = ctx(online={"algorithm": {"name": "distillation", "teacher": "x"}})
    named = other.get("base_digest", "mine.models:load")
    with pytest.raises(
        PolicyError, match=f"teacher in .*{named}.* take a teacher of the same base"
    ):
        open_policy(
            stage, load_model(base_folder), start(FULL), teachers={"teacher": tmp_path / "teacher"}
        )


@BOTH
def test_the_base_can_be_the_teacher_of_a_trained_policy(base_folder, model, start, config):
    policy = Policy(model, config, 0)
    move(policy)
    trained = values(policy)
    policy.load_copy("teacher", start(config))
    assert same(policy.copies["teacher"], policy.copies["reference"])
    assert same(values(policy), trained)
    assert not torch.equal(
        next(iter(trained.values())), next(iter(policy.copies["teacher"].values()))
    )


# A reference that is reset.


@pytest.mark.parametrize("config", [FULL, LORA], ids=["full", "lora"])
def test_the_reference_becomes_the_policy_after_so_many_steps(model, config):
    keys = {"weight": 0.1, "penalty": "velocity", "reset_every": 2}
    updater = updater_of(model, NFT, config, lr=0.5, reference=keys)
    start = values(updater.policy)
    batch = forward_rows(model, updater.stage)
    resets = []
    penalties = []
    references = []
    for _ in range(5):
        penalties.append(updater.update_policy(batch, 2)["kl/reference"])
        resets.append(updater.finish_step()["reference/reset"])
        references.append(dict(updater.policy.copies["recent"]))
    assert resets == [0, 1, 0, 1, 0]
    assert same(references[0], start)
    assert not same(references[1], start)
    assert same(references[1], references[2])
    assert not same(references[2], references[3])
    # The base model stays what the drift is measured against.
    assert same(updater.policy.copies["reference"], start)
    # Nothing has moved since the start, or since a reset, and rounding is far below a step.
    assert [penalty < 1e-10 for penalty in penalties] == [True, False, True, False, True]


def test_the_reference_becomes_the_policy_once_the_penalty_is_above_its_limit(model):
    keys = {"weight": 0.1, "penalty": "velocity", "reset_above": 1e-6}
    updater = updater_of(model, NFT, lr=0.5, reference=keys)
    batch = forward_rows(model, updater.stage)
    # The first update of a step after a reset has a penalty of 0, so its step does not reset.
    resets = []
    for updates in (1, 2, 1, 1):
        for _ in range(updates):
            updater.update_policy(batch, 2)
        resets.append(updater.finish_step()["reference/reset"])
    assert resets == [0, 1, 0, 1]
    far = updater_of(model, NFT, lr=0.5, reference=keys | {"reset_above": 1e6})
    for _ in range(3):
        far.update_policy(batch, 2)
        assert far.finish_step() == {"reference/reset": 0.0}
    assert updater_of(model, NFT).finish_step() == {}


def test_a_reset_reference_comes_with_the_policy_folder_and_is_part_of_the_stage(ctx):
    nft = {"algorithm": {"name": "diffusion_nft"}}
    stage = ctx(online=nft | {"reference": {"weight": 0.1, "reset_every": 2}})
    assert stage.following_copies == ("old", "recent")
    assert ctx(online=nft).following_copies == ("old",)
    # No penalty, no copy.
    unused = ctx(online=nft | {"reference": {"weight": 0, "reset_every": 2}})
    assert unused.following_copies == ("old",)
    assert unused.config.reference.copy_name == "reference"


def test_a_reset_reference_goes_on_in_the_next_stage_of_the_algorithm(
    base_folder, ctx, start, tmp_path
):
    stage = ctx(
        online={
            "algorithm": {"name": "diffusion_nft"},
            "reference": {"weight": 0.1, "reset_every": 2},
        }
    )
    policy, metadata = open_policy(stage, load_model(base_folder), start(FULL))
    updater = PolicyUpdater(policy, stage.online_config, metadata, sgd(policy, 0.5))
    take_steps(updater, 3)
    recent = dict(policy.copies["recent"])
    assert not same(recent, values(policy))
    record = StageRecord(
        label="x", algorithm="diffusion_nft", samples=0, optimizer_steps=3, seconds={}
    )
    save_policy(stage, updater, metadata, record, tmp_path / "trained")
    again, _ = open_policy(stage, load_model(base_folder), tmp_path / "trained")
    assert same(again.copies["recent"], recent)
