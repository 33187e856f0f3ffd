"""The copies that follow the policy: each by its algorithm's schedule for it, and the average that
is evaluated and served.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from training_cases import (
    BOTH,
    FULL,
    GROUPS,
    LORA,
    PAIRS,
    average_policy,
    farthest,
    forward_rows,
    sgd,
    stage_of,
    take_steps,
    train,
    updater_of,
)

from ebbflow.data.records import StageRecord
from ebbflow.models import load_model
from ebbflow.training.policy import Policy
from ebbflow.training.policy_io import open_policy, save_policy
from ebbflow.training.policy_metadata import PolicyMetadata, Progress, read_policy_metadata
from ebbflow.training.update import PolicyUpdater
from tests.parameters import move, same, values


def followed(start, seen, decays):
    """copy <- d copy + (1 - d) theta, in float64."""
    copy = {name: value.double() for name, value in start.items()}
    for theta, d in zip(seen, decays, strict=True):
        copy = {name: d * value + (1 - d) * theta[name].double() for name, value in copy.items()}
    return {name: value.float() for name, value in copy.items()}


@pytest.mark.parametrize("algorithm", ["diffusion_nft", "awm", "crd"])
def test_the_old_copy_follows_by_its_schedule(model, algorithm):
    keys = {"name": algorithm, "old": {"warmup": 1, "slope": 0.4, "max_decay": 0.5}}
    updater = updater_of(model, keys, lr=0.05)
    start = values(updater.policy)
    seen = take_steps(updater, 4, GROUPS)
    assert farthest(start, seen[-1]) > 1e-4
    assert farthest(updater.policy.copies["old"], followed(start, seen, [0, 0.4, 0.5, 0.5])) < 1e-6
    assert same(updater.policy.copies["reference"], start)


def test_a_copy_without_a_schedule_stays_as_it_was(model):
    """As a user's own algorithm may have it."""
    updater = updater_of(model, "awm", lr=0.05)
    updater.algorithm = replace(updater.algorithm, follows={})
    start = values(updater.policy)
    assert farthest(start, take_steps(updater, 2)[-1]) > 1e-4
    assert same(updater.policy.copies["old"], start)


CRD = {
    "name": "crd",
    "old": {"min_decay": 0.25, "slope": 0.25, "max_decay": 0.7},
    "sampling": {"warmup": 2, "slope": 0.5, "max_decay": 0.9},
}


@pytest.mark.parametrize("config", [FULL, LORA], ids=["full", "lora"])
def test_the_sampler_and_the_moving_reference_follow_each_by_its_own_schedule(model, config):
    updater = updater_of(model, CRD, config, lr=0.5)
    start = values(updater.policy)
    batch = forward_rows(model, updater.stage, GROUPS)
    seen = []
    for step in range(4):
        for _ in range(2):  # the copies wait for the end of the rollout step
            before = {name: dict(updater.policy.copies[name]) for name in ("old", "sampling")}
            updater.update_policy(batch, 1)
            assert all(same(updater.policy.copies[name], copy) for name, copy in before.items())
        updater.finish_step()
        seen.append(values(updater.policy))
        on_policy = same(updater.policy.copies["sampling"], seen[-1])
        assert on_policy == (step < 2)
        assert farthest(updater.policy.copies["old"], updater.policy.copies["sampling"]) > 1e-6
    assert (
        farthest(updater.policy.copies["old"], followed(start, seen, [0.5, 0.7, 0.7, 0.7])) < 1e-6
    )
    assert (
        farthest(updater.policy.copies["sampling"], followed(start, seen, [0, 0, 0.5, 0.9])) < 1e-6
    )
    assert same(updater.policy.copies["reference"], start)


@pytest.mark.parametrize(
    ("algorithm", "stays"), [("diffusion_nft", True), ("crd", True), ("awm", False)]
)
def test_an_old_copy_that_generates_stays_until_its_rollouts_are_learnt_from(
    model, algorithm, stays
):
    updater = updater_of(model, {"name": algorithm, "old": {"max_decay": 0}})
    start = values(updater.policy)
    batch = forward_rows(model, updater.stage, GROUPS)
    for _ in range(2):
        updater.update_policy(batch, 1)
        assert same(updater.policy.copies["old"], start) == stays
    updater.finish_step()
    assert same(updater.policy.copies["old"], values(updater.policy))
    assert not same(values(updater.policy), start)


def test_the_reference_of_pairs_is_refreshed_every_so_often(model):
    updater = updater_of(model, {"name": "diffusion_dpo", "refresh_every": 2}, lr=1e-3)
    start = values(updater.policy)
    (after_one,) = take_steps(updater, 1, PAIRS)
    assert same(updater.policy.copies["old"], start)
    after_two, after_three, after_four = (
        take_steps(updater, 1, PAIRS)[0],
        *take_steps(updater, 2, PAIRS),
    )
    assert not same(after_three, after_two)
    assert same(updater.policy.copies["old"], after_four)
    assert same(updater.policy.copies["reference"], start)
    take_steps(updater, 1, PAIRS)
    assert same(updater.policy.copies["old"], after_four)
    assert not same(values(updater.policy), after_four)


def test_pairs_that_are_just_refreshed_have_no_margin(model):
    updater = updater_of(model, {"name": "diffusion_dpo", "refresh_every": 1}, lr=1e-3)
    batch = forward_rows(model, updater.stage, PAIRS)
    for _ in range(3):
        assert updater.update_policy(batch, 1)["dpo/margin"] == pytest.approx(0, abs=1e-5)
    base = updater_of_same_policy(updater, {"name": "diffusion_dpo"})
    assert abs(base.update_policy(batch, 1)["dpo/margin"]) > 1e-4


def updater_of_same_policy(updater, algorithm):
    return PolicyUpdater(updater.policy, stage_of(algorithm), optimizer=sgd(updater.policy, 0))


def test_an_algorithm_without_an_old_copy_leaves_it_alone(model):
    updater = updater_of(model, "sft")
    start = values(updater.policy)
    take_steps(updater, 2)
    assert same(updater.policy.copies["old"], start)


# The average.


@BOTH
@pytest.mark.parametrize("version", [0, 2])
def test_the_average_follows_every_update_of_the_policy(model, config, version):
    """Its schedule counts the updates since the base model, over all stages."""
    updater = updater_of(model, "sft", average_policy(config), lr=0.5, version=version)
    start = values(updater.policy)
    seen = take_steps(updater, 4)
    decays = {0: [0.25, 0.5, 0.75, 0.8], 2: [0.75, 0.8, 0.8, 0.8]}[version]
    assert farthest(start, seen[-1]) > 1e-3
    assert farthest(updater.policy.copies["ema"], followed(start, seen, decays)) < 1e-6
    assert farthest(updater.policy.copies["ema"], seen[-1]) > 1e-5


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "diffusion_nft", "old": {"warmup": 1, "slope": 0.3, "max_decay": 0.8}},
        {"name": "awm", "old": {"slope": 0.2, "max_decay": 0.9}},
        {"name": "diffusion_dpo", "refresh_every": 2},
        CRD,
    ],
    ids=lambda algorithm: algorithm["name"],
)
def test_a_schedule_goes_on_in_the_next_stage_of_the_algorithm(
    base_folder, start, ctx, tmp_path, algorithm
):
    """Three steps in one stage, or one and two in two: the copies are the same, so their schedules
    did not start again.
    """
    ctx = ctx(online={"algorithm": algorithm})
    ends = []
    for stages in ((3,), (1, 2)):
        folder = start(FULL)
        for number, steps in enumerate(stages):
            policy, metadata = open_policy(ctx, load_model(base_folder), folder)
            updater = PolicyUpdater(policy, ctx.online_config, metadata, sgd(policy, 1e-3))
            take_steps(updater, steps, PAIRS)
            folder = tmp_path / f"{len(stages)}-{number}"
            record = StageRecord(
                label="x", algorithm="x", samples=0, optimizer_steps=steps, seconds={}
            )
            save_policy(ctx, updater, metadata, record, folder)
        ends.append({name: policy.copies[name] for name in ctx.following_copies})
        assert read_policy_metadata(folder).progress == Progress(
            algorithm=algorithm["name"], steps=3, updates=3
        )
        assert all(farthest(copy, values(policy)) > 1e-7 for copy in ends[-1].values())
    assert all(farthest(copy, ends[1][name]) < 1e-7 for name, copy in ends[0].items())


@BOTH
def test_two_stages_of_one_update_are_one_stage_of_two(base_folder, start, ctx, tmp_path, config):
    """Through a folder in between: training goes on from the parameters themselves, and the average
    where it was.
    """
    config = average_policy(config)
    ctx = ctx(config)
    first = start(config)
    whole = train(ctx, base_folder, first, tmp_path / "whole", 2)
    train(ctx, base_folder, first, tmp_path / "half", 1)
    halves = train(ctx, base_folder, tmp_path / "half", tmp_path / "halves", 1)
    for one, other in zip(whole, halves, strict=True):
        assert farthest(one, other) < 1e-7
    assert farthest(*whole) > 1e-6
    assert read_policy_metadata(tmp_path / "halves").version == 2
    assert read_policy_metadata(tmp_path / "halves").copies == ("iterate",)


@BOTH
def test_what_is_served_is_the_average(base_folder, start, ctx, tmp_path, config):
    config = average_policy(config)
    parameters, average = train(ctx(config), base_folder, start(config), tmp_path / "trained", 3)
    served = Policy(load_model(base_folder), config, 0)
    metadata = served.load_folder(tmp_path / "trained")
    assert same(values(served), average)
    assert served.copies.keys() == {"reference"}
    going_on = Policy(load_model(base_folder), config, 0)
    assert going_on.load_folder(tmp_path / "trained", to_train=True) == metadata
    assert same(values(going_on), parameters)
    assert same(going_on.copies["ema"], average)
    assert going_on.copies.keys() == {"reference", "ema"}


def test_a_policy_without_an_average_serves_its_parameters(base_folder, start, ctx, tmp_path):
    parameters, average = train(ctx(), base_folder, start(FULL), tmp_path / "trained", 2)
    assert average is None
    served = Policy(load_model(base_folder), FULL, 0)
    assert served.load_folder(tmp_path / "trained").copies == ()
    assert same(values(served), parameters)


def test_an_average_of_a_stage_that_learnt_nothing_is_the_base(base_folder, start, ctx, tmp_path):
    config = average_policy(FULL)
    train(ctx(config), base_folder, start(config), tmp_path / "trained", 0)
    policy, metadata = open_policy(ctx(config), load_model(base_folder), tmp_path / "trained")
    assert metadata.version == 0
    assert same(values(policy), policy.copies["reference"])
    assert same(policy.copies["ema"], policy.copies["reference"])


# What a folder brings along.


def save_with_copies(folder, model, algorithm, names=("old",), config=FULL):
    """A trained policy folder with copies that lag behind, no two alike."""
    policy = Policy(model, config, 0)
    for seed, name in enumerate(names):
        policy.snapshot_copy(name)
        move(policy, seed=seed)
    copies = {name: dict(policy.copies[name]) for name in names}
    metadata = PolicyMetadata(base_digest="b", recipe_digest="r", config=config, version=3,
                      progress=Progress(algorithm=algorithm), copies=names)  # fmt: skip
    policy.save_folder(folder, metadata)
    return values(policy), copies


@pytest.mark.parametrize(
    ("algorithm", "names"),
    [("diffusion_nft", ("old",)), ("awm", ("old",)), ("crd", ("old", "sampling"))],
    ids=str,
)
def test_the_copies_of_the_same_algorithm_go_on(
    base_folder, model, ctx, tmp_path, algorithm, names
):
    parameters, copies = save_with_copies(tmp_path / "policy", model, algorithm, names)
    policy, _ = open_policy(
        ctx(online={"algorithm": {"name": algorithm}}), load_model(base_folder), tmp_path / "policy"
    )
    assert same(values(policy), parameters)
    assert all(same(policy.copies[name], copy) for name, copy in copies.items())


@pytest.mark.parametrize("before", ["awm", "mix_grpo", ""])
def test_the_copies_of_another_algorithm_are_dropped(base_folder, model, ctx, tmp_path, before):
    parameters, copies = save_with_copies(tmp_path / "policy", model, before, ("old", "sampling"))
    policy, _ = open_policy(
        ctx(online={"algorithm": {"name": "diffusion_nft"}}),
        load_model(base_folder),
        tmp_path / "policy",
    )
    assert same(policy.copies["old"], parameters)
    assert not same(policy.copies["old"], copies["old"])
    without, _ = open_policy(
        ctx(online={"algorithm": {"name": "sft"}}), load_model(base_folder), tmp_path / "policy"
    )
    assert not {"old", "sampling"} & without.copies.keys()


@pytest.mark.any_cpu
@pytest.mark.parametrize(
    ("algorithm", "kept"),
    [
        ({"name": "diffusion_nft"}, ("old",)),
        ({"name": "crd"}, ("old", "sampling")),
        ({"name": "awm"}, ("old",)),
        ({"name": "awm", "old_weight": 0}, ()),
        ({"name": "diffusion_dpo"}, ()),
        ({"name": "diffusion_dpo", "refresh_every": 3}, ("old",)),
        ({"name": "mix_grpo"}, ()),
        ({"name": "dgpo"}, ()),
    ],
    ids=str,
)
def test_a_stage_hands_on_the_old_copy_that_its_algorithm_keeps(
    base_folder, start, ctx, tmp_path, algorithm, kept
):
    stage = ctx(online={"algorithm": algorithm})
    policy, metadata = open_policy(stage, load_model(base_folder), start(FULL))
    record = StageRecord(
        label="1.1 online", algorithm="x", samples=0, optimizer_steps=4, seconds={}
    )
    updater = PolicyUpdater(policy, stage.online_config, metadata)
    updater.updates = 4
    updater.steps = 2
    save_policy(stage, updater, metadata, record, tmp_path / "trained")
    written = read_policy_metadata(tmp_path / "trained")
    assert (written.copies, written.version) == (kept, 4)
    assert written.progress == Progress(algorithm=algorithm["name"], steps=2, updates=4)
    assert written.stages == ("1.1 online",)
