"""Offline training: what it does to the policy, and what it refuses."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from offline_cases import write_scores

from ebbflow.data.prompts import write_prompts
from ebbflow.data.schema import ADVANTAGES, PROMPTS
from ebbflow.models import load_model
from ebbflow.offline.advantages import write_advantages
from ebbflow.offline.rollouts import generate_shard
from ebbflow.offline.scoring import score_shard
from ebbflow.offline.training import train_epochs, train_offline_folder
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.registry import ALGORITHMS
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.tables import write_table
from ebbflow.training.passes import TrainingError
from ebbflow.training.policy import Policy
from ebbflow.training.policy_io import open_policy
from ebbflow.training.policy_metadata import Progress, read_policy_metadata, write_base_policy
from ebbflow.training.update import PolicyUpdater
from ebbflow.watchdog import Watchdog

FORWARD = [name for name, config in ALGORITHMS.items() if config.kind == "forward"]


def test_shards_too_small_for_every_process_are_named_and_left_out(ctx, stored, run, pretend):
    pretend(0, 4)
    rollouts, advantages, _ = stored(20, 3)
    with pytest.warns(
        UserWarning,
        match=r"fewer samples, pairs or groups to train on than the 4 processes: r1\.parquet \(",
    ):
        record, calls = run(ctx, rollouts, advantages)
    assert "r1.parquet" in record.alarms[0]
    assert {key for call in calls for key in call.keys} <= {
        (p, s) for p in range(10) for s in range(2)
    }


def test_shards_that_are_all_too_small_are_refused(ctx, stored, run, pretend):
    pretend(0, 4)
    rollouts, advantages, _ = stored(3, 3)
    with pytest.raises(
        TrainingError,
        match=r"than the 4 processes: r0.parquet \(\d\), r1.parquet.*lower the stage's 'shards'",
    ):
        run(ctx, rollouts, advantages)


def test_nothing_kept_trains_nothing(ctx, stored, run, tmp_path):
    rollouts, _, _ = stored(8, 8)
    rewards = [[0.5] * 8, [0.5] * 6 + [np.nan] * 2]
    scores = [
        write_scores(
            ctx,
            shard,
            tmp_path / f"s{shard}.parquet",
            [(4 * shard + p, s) for p in range(4) for s in range(2)],
            rewards[shard],
        )
        for shard in range(2)
    ]
    metrics = write_advantages(ctx, scores, tmp_path / "none.parquet")
    assert metrics["group/dropped_samples"] == 16
    with pytest.warns(
        UserWarning, match="nothing was learnt: no group has samples that score differently"
    ):
        record, calls = run(ctx, rollouts, tmp_path / "none.parquet")
    assert record.optimizer_steps == 0
    assert record.samples == 16
    assert record.alarms == ["nothing was learnt: no group has samples that score differently"]
    assert not calls


def test_a_warmup_as_long_as_the_stage_is_refused(make_recipe, stored, run):
    """Two epochs of 24 rows, of which 19 have an advantage: three batches of at most 8."""

    def warming_up(updates):
        return StageContext(
            make_recipe(offline={"optimizer": {"schedule": {"warmup": updates}}}), 0, 1
        )

    rollouts, advantages, _ = stored(24)
    with pytest.raises(
        TrainingError,
        match=r"optimizer.schedule.warmup = 6 takes the whole stage of 6 optimiser steps; lower it",
    ):
        run(warming_up(6), rollouts, advantages)
    assert len(run(warming_up(5), rollouts, advantages)[1]) == 6


@pytest.fixture(scope="module")
def generated(make_recipe, base_folder, scorer, make_prompts, tmp_path_factory):
    """Rollouts, scores and advantages of a whole tiny stage, made with the base."""
    ctx = StageContext(make_recipe(), 0, 1)
    model = load_model(base_folder)
    tmp_path = tmp_path_factory.mktemp("generated")
    policy = Policy(model, ctx.recipe.policy, 0)
    policy.ensure_copy("old")
    rollouts = [tmp_path / f"r{i}" for i in range(2)]
    scores = [tmp_path / f"s{i}" for i in range(2)]
    for shard in range(2):
        generate_shard(ctx, model, policy, 0, make_prompts(6), shard, rollouts[shard])
        score_shard(ctx, scorer, make_prompts(6), rollouts[shard], scores[shard])
    write_advantages(ctx, scores, tmp_path / "advantages")
    return rollouts, tmp_path / "advantages"


@pytest.mark.parametrize(
    "config", [PolicyConfig(), PolicyConfig(train="lora", rank=4, alpha=8)], ids=["full", "lora"]
)
@pytest.mark.parametrize("name", FORWARD)
def test_every_forward_algorithm_trains_on_stored_samples(
    make_recipe, base_folder, generated, make_prompts, name, config
):
    ctx = StageContext(make_recipe(offline={"algorithm": {"name": name}}), 0, 1)
    model = load_model(base_folder)
    policy = Policy(model, config, 0)
    policy.ensure_copy("old")
    start = {key: value.detach().clone() for key, value in policy.parameters.items()}
    recorder = MetricsRecorder()
    updater = PolicyUpdater(policy, ctx.offline_config)
    record = train_epochs(ctx, model, updater, make_prompts(6), *generated, recorder)
    logged = recorder.metrics_rows
    assert record.label == "1.2 offline"
    assert record.algorithm == name
    assert record.samples == 16
    assert record.optimizer_steps == len(logged) == 4
    assert record.alarms == []
    assert record.seconds.keys() == {"rollout", "scoring", "training"}
    assert any(not torch.equal(value, start[key]) for key, value in policy.parameters.items())
    assert all(torch.equal(value, start[key]) for key, value in policy.copies["reference"].items())
    old_moved = any(
        not torch.equal(value, start[key]) for key, value in policy.copies["old"].items()
    )
    assert old_moved == (name == "awm")
    names = {"loss", "grad_norm", "lr", "velocity_drift", "alarm/velocity_drift"}
    assert names | {"epoch", "seconds/training", "ms_per_image/training"} <= logged[0].keys()
    assert all(np.isfinite(value) for metrics in logged for value in metrics.values())


def test_the_old_policy_is_where_training_began(ctx, base_folder, generated, make_prompts):
    model = load_model(base_folder)
    recorder = MetricsRecorder()
    policy = Policy(model, ctx.recipe.policy, 0)
    policy.ensure_copy("old")
    updater = PolicyUpdater(policy, ctx.offline_config)
    train_epochs(ctx, model, updater, make_prompts(6), *generated, recorder)
    assert recorder.metrics_rows[0]["nft/old_deviation"] == pytest.approx(0, abs=1e-9)
    assert recorder.metrics_rows[-1]["nft/old_deviation"] > 1e-9


def test_the_drift_alarm_stands_in_the_record(make_recipe, base_folder, generated, make_prompts):
    ctx = StageContext(make_recipe(offline={"drift_alarm": 1e-9}), 0, 1)
    model = load_model(base_folder)
    policy = Policy(model, ctx.recipe.policy, 0)
    policy.ensure_copy("old")
    updater = PolicyUpdater(policy, ctx.offline_config)
    with pytest.warns(UserWarning, match="velocity drift") as warned:
        record = train_epochs(ctx, model, updater, make_prompts(6), *generated, MetricsRecorder())
    assert len(warned) == len(record.alarms) == 1


@pytest.fixture
def folders(ctx, base_folder, make_prompts, tmp_path):
    """The base policy folder and the prompt table."""
    write_base_policy(
        tmp_path / "start", verify_folder(base_folder), ctx.recipe.digest, ctx.recipe.policy
    )
    write_prompts(
        pa.Table.from_pylist([vars(prompt) for prompt in make_prompts(6)], PROMPTS),
        tmp_path / "prompts.parquet",
    )
    return tmp_path / "start", tmp_path / "prompts.parquet"


def test_the_stage_repeats_itself_byte_for_byte_and_hands_on_a_whole_folder(
    ctx, base_folder, generated, folders, tmp_path
):
    start, prompts = folders
    for name in ("one", "two"):
        stage_folders = StageFolders(base_folder, start, prompts, tmp_path / name)
        train_offline_folder(ctx, stage_folders, *generated, MetricsRecorder())
    assert verify_folder(tmp_path / "one") == verify_folder(tmp_path / "two")
    metadata = read_policy_metadata(tmp_path / "one")
    assert (metadata.version, metadata.copies, metadata.stages) == (4, ("old",), ("1.2 offline",))
    assert metadata.progress == Progress(algorithm="diffusion_nft", steps=0, updates=4)
    assert metadata.base_digest == verify_folder(base_folder)
    assert metadata.recipe_digest == ctx.recipe.digest


def test_what_may_hang_in_an_offline_stage_is_named(
    ctx, base_folder, generated, folders, make_prompts, tmp_path, monkeypatch
):
    names = []
    add_activity = Watchdog.add

    def add_and_remember(watchdog, name):
        names.append(name)
        return add_activity(watchdog, name)

    monkeypatch.setattr(Watchdog, "add", add_and_remember)
    start, prompts = folders
    stage_folders = StageFolders(base_folder, start, prompts, tmp_path / "trained")
    train_offline_folder(ctx, stage_folders, *generated, MetricsRecorder())
    assert names[0] == f"loading the model of {base_folder}"
    assert names[1] == "rank 0: training step 1 of 4"
    policy, _ = open_policy(ctx, load_model(base_folder), start)
    policy.ensure_copy("old")
    names.clear()
    generate_shard(ctx, policy.model, policy, 0, make_prompts(6), 0, tmp_path / "rollouts")
    assert names
    assert all(name.startswith("1.2 offline: generating ") for name in names)


def test_the_next_stage_generates_with_what_this_one_trained(
    ctx, base_folder, generated, folders, tmp_path
):
    start, prompts = folders
    stage_folders = StageFolders(base_folder, start, prompts, tmp_path / "trained")
    train_offline_folder(ctx, stage_folders, *generated, MetricsRecorder())
    following = StageContext(ctx.recipe, ctx.round + 1, ctx.stage)
    policy, _ = open_policy(following, load_model(base_folder), tmp_path / "trained")
    with policy.use_copy(following.algorithm.generates):
        generating = {name: value.detach().clone() for name, value in policy.parameters.items()}
    assert any(
        not torch.equal(value, policy.copies["reference"][name])
        for name, value in generating.items()
    )


def test_a_stage_with_nothing_to_train_hands_on_the_policy_it_got(
    ctx, base_folder, generated, folders, tmp_path
):
    start, prompts = folders
    write_table(tmp_path / "none", ADVANTAGES, [], {"seconds": {"scoring": 1.0}})
    with pytest.warns(UserWarning, match="nothing was learnt"):
        train_offline_folder(
            ctx,
            StageFolders(base_folder, start, prompts, tmp_path / "trained"),
            generated[0],
            tmp_path / "none",
            MetricsRecorder(),
        )
    assert read_policy_metadata(tmp_path / "trained").version == 0
    policy, _ = open_policy(ctx, load_model(base_folder), tmp_path / "trained")
    assert all(
        torch.equal(value, policy.copies["reference"][name])
        for name, value in policy.parameters.items()
    )
