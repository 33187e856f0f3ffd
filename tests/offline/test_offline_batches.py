"""What the epochs of an offline stage cover: every kept row once, in batches that processes
share."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from offline_cases import Watched

from ebbflow.data.schema import ADVANTAGES
from ebbflow.flow.noise import SampleKeys
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.storage.tables import read_table, read_table_metadata, write_table
from ebbflow.training.batches import build_forward_batch


def test_an_epoch_covers_every_kept_row_once_in_equal_batches(make_recipe, stored, run):
    ctx = StageContext(make_recipe(offline={"epochs": 3, "batch_size": 8, "micro_batch": 3}), 0, 1)
    rollouts, advantages, kept = stored(24, 12)
    recorder = MetricsRecorder()
    record, seen = run(ctx, rollouts, advantages, recorder)
    per_epoch = len(seen) // 3
    draws = ctx.config.hyper_parameters.noise_levels
    for epoch in range(3):
        calls = seen[epoch * per_epoch : (epoch + 1) * per_epoch]
        samples = [call.keys[::draws] for call in calls]  # the draws of a sample are adjacent
        assert Counter(key for batch in samples for key in batch) == dict.fromkeys(kept, 1)
        assert {len(batch) for batch in samples} <= {4, 5, 6, 7, 8}
        # One shard after the other: the first holds prompts 0 to 11.
        shards = [{prompt_id < 12 for prompt_id, _ in batch} for batch in samples]
        assert all(len(shard) == 1 for shard in shards)
        assert sum(one != other for one, other in pairwise(shards)) == 1
        for call in calls:
            assert call.passes == -(-len(call.keys) // 3)
            assert call.batch.advantage.tolist() == [100 * p + s for p, s in call.keys]
    assert [(row["step"], row["epoch"]) for row in recorder.metrics_rows] == [
        (i, i // per_epoch) for i in range(3 * per_epoch)
    ]
    assert record.optimizer_steps == len(seen)
    assert record.samples == 36
    assert record.seconds.keys() == {"rollout", "scoring", "training"}
    assert record.seconds["rollout"] == 6


def test_batches_of_a_shard_differ_by_one_sample_at_most(make_recipe, stored, run):
    ctx = StageContext(make_recipe(offline={"epochs": 1, "batch_size": 8, "shards": 1}), 0, 1)
    sizes = sorted(
        len(call.keys) // 2 for call in run(ctx, *stored(26)[:2])[1]
    )  # two draws a sample
    assert sizes == [6, 7, 7]


def keys_seen(ran):
    return [call.keys for call in ran[1]]


def test_the_order_is_seeded_and_new_in_every_epoch(make_recipe, stored, run):
    ctx = StageContext(make_recipe(offline={"epochs": 2}), 0, 1)
    shards = stored(24, 12)[:2]
    first = keys_seen(run(ctx, *shards))
    assert keys_seen(run(ctx, *shards)) == first
    assert first[: len(first) // 2] != first[len(first) // 2 :]
    assert (
        keys_seen(run(StageContext(make_recipe(seed=1, offline={"epochs": 2}), 0, 1), *shards))
        != first
    )


@pytest.mark.parametrize("algorithm", ["diffusion_nft", "dgpo", "diffusion_dpo"])
def test_the_order_of_the_advantages_does_not_matter(make_recipe, stored, run, tmp_path, algorithm):
    ctx = StageContext(make_recipe(offline={"algorithm": {"name": algorithm}}), 0, 1)
    rollouts, advantages, _ = stored(24, 12)
    first = keys_seen(run(ctx, rollouts, advantages))
    table = read_table(advantages)
    shuffled = table.take(np.random.default_rng(0).permutation(len(table))).combine_chunks()
    write_table(
        tmp_path / "shuffled", ADVANTAGES, shuffled.to_batches(), read_table_metadata(advantages)
    )
    assert keys_seen(run(ctx, rollouts, tmp_path / "shuffled")) == first


def test_every_epoch_draws_noise_of_its_own(make_recipe, stored, run):
    ctx = StageContext(make_recipe(offline={"epochs": 2}), 0, 1)
    noise = [
        tuple(row.flatten().tolist())
        for call in run(ctx, *stored(12)[:2])[1]
        for row in call.batch.noise
    ]
    assert len(set(noise)) == len(noise)


def test_noise_levels_of_a_schedule_are_the_samplers(ctx, stored, run):
    calls = run(ctx, *stored(12)[:2])[1]
    sigmas = torch.cat([call.batch.inputs.sigma for call in calls])
    assert sorted(sigmas.unique().tolist()) == sorted(Watched(None).sampler_sigmas[:-1].tolist())


def units_seen(call):
    """The samples of each unit, better first, with the sigma that they share."""
    found = {}
    for key, group_index, sigma in zip(
        call.keys, call.batch.group_index.tolist(), call.batch.inputs.sigma.tolist(), strict=True
    ):
        found.setdefault((group_index, sigma), []).append(key)
    return Counter((sigma, tuple(members)) for (_, sigma), members in found.items())


@pytest.mark.any_cpu
@pytest.mark.parametrize("algorithm", ["diffusion_nft", "dgpo", "diffusion_dpo"])
@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_each_batch_and_tear_no_unit(
    make_recipe, stored, run, pretend, world, algorithm
):
    ctx = StageContext(
        make_recipe(offline={"epochs": 1, "micro_batch": 2, "algorithm": {"name": algorithm}}), 0, 1
    )
    shards = stored(24, 12)[:2]
    alone = run(ctx, *shards)[1]
    shares = []
    for rank in range(world):
        pretend(rank, world)
        shares.append(run(ctx, *shards)[1])
    for step, call in enumerate(alone):
        parts = [share[step] for share in shares]
        assert sum((units_seen(part) for part in parts), Counter()) == units_seen(call)
        assert len({part.passes for part in parts}) == 1
    sizes = {len(members) for call in alone for _, members in units_seen(call)}
    assert sizes == {"diffusion_nft": {1}, "dgpo": {1, 2}, "diffusion_dpo": {2}}[algorithm]


@pytest.mark.any_cpu
@pytest.mark.parametrize("algorithm", ["diffusion_nft", "dgpo", "diffusion_dpo"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("batch_size", "micro_batch"), [(3, 1), (8, 1), (1, 1)])
def test_every_process_has_work_in_every_pass(
    make_recipe, stored, run, pretend, rank, batch_size, micro_batch, algorithm
):
    # A process that runs out of rows before the others would fail alone and leave them waiting.
    settings = {"epochs": 1, "batch_size": batch_size, "micro_batch": micro_batch}
    ctx = StageContext(
        make_recipe(offline=settings | {"algorithm": {"name": algorithm, "noise_levels": 1}}), 0, 1
    )
    pretend(rank, 2)
    calls = run(ctx, *stored(14)[:2])[1]
    assert calls
    for call in calls:
        assert len(call.batch.group_index.unique()) >= call.passes >= 1


def test_the_passes_are_those_of_the_largest_share(make_recipe, stored, run, pretend):
    """Seven groups of two on two processes, a group a pass: four on one, three on the other, and
    three passes on both.
    """
    keys = {"name": "dgpo", "noise_levels": 1}
    ctx = StageContext(
        make_recipe(offline={"epochs": 1, "batch_size": 100, "micro_batch": 2, "algorithm": keys}),
        0,
        1,
    )
    shards = stored(14)[:2]
    found = []
    for rank in range(2):
        pretend(rank, 2)
        (call,) = run(ctx, *shards)[1]
        found.append((len(call.batch.group_index.unique()), call.passes))
    assert found == [(4, 3), (3, 3)]


def test_pairs_are_the_better_and_the_worse_of_a_prompt(make_recipe, stored, run):
    ctx = StageContext(make_recipe(offline={"algorithm": {"name": "diffusion_dpo"}}), 0, 1)
    for call in run(ctx, *stored(24, 12)[:2])[1]:
        for better, worse in zip(call.keys[::2], call.keys[1::2], strict=True):
            assert better == (worse[0], 1)  # the advantage is 100 * prompt + sample
            assert worse[1] == 0


def test_the_noise_of_a_sample_is_its_own(ctx, stored, run):
    call = run(ctx, *stored(12)[:2])[1][0]
    first = slice(0, 1)
    keys = SampleKeys(ctx.stage_seed, [call.keys[0][0]], [call.keys[0][1]])
    conditioning = call.batch.inputs.conditioning.select_rows(first)
    clean = call.batch.clean[first]
    advantage = call.batch.advantage[first]
    alone = build_forward_batch(
        clean,
        conditioning,
        advantage,
        keys,
        np.array([0]),
        ctx.config.hyper_parameters,
        torch.tensor([1, 2 / 3, 1 / 3, 0]),
        visit=0,
    )
    assert torch.equal(alone.noise[0], call.batch.noise[0])
