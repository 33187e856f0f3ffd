"""Offline training: what its epochs cover, what the advantages table holds, and what it does to the policy."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ebbflow.algorithms.advantages import compute_advantages
from ebbflow.data.prompts import write_prompts
from ebbflow.data.schema import ADVANTAGES, PROMPTS, rollout_schema, score_schema
from ebbflow.flow.noise import SampleKeys
from ebbflow.models import load_model
from ebbflow.models.encoding import encode_once
from ebbflow.offline import training as offline
from ebbflow.offline.advantages import write_advantages
from ebbflow.offline.rollouts import generate_shard
from ebbflow.offline.scoring import score_shard
from ebbflow.offline.shards import layout_metadata, rollout_batch
from ebbflow.offline.training import train_epochs, train_offline_folder
from ebbflow.recipe.recipe import PolicyConfig
from ebbflow.recipe.registry import ALGORITHMS
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.storage.artifacts import verify
from ebbflow.storage.tables import TableError, nan_to_null, read_table, read_table_metadata, write_table
from ebbflow.training.batches import forward_batch
from ebbflow.training.distributed import Ranks
from ebbflow.training.gradients import TrainingError
from ebbflow.training.policy import Policy
from ebbflow.training.policy_io import open_policy
from ebbflow.training.policy_metadata import Progress, read_policy_metadata, write_base_policy
from ebbflow.training.update import PolicyUpdater

NAN = float("nan")
FORWARD = [name for name, config in ALGORITHMS.items() if config.kind == "forward"]


@pytest.fixture
def ctx(make_recipe):
    return StageContext(make_recipe(), round=0, stage=1)


ABOUT_SCORES = {"seconds": {"scoring": 2.0}, "weights": {"darkness": 1.0}}


def write_scores(path, keys, rewards):
    rewards = np.array(rewards, np.float64)
    prompt_ids, samples = zip(*keys, strict=True)
    columns = [pa.array(prompt_ids), pa.array(samples), nan_to_null(rewards), nan_to_null(rewards)]
    failure = pa.array(["broken" if np.isnan(reward) else None for reward in rewards], pa.string())
    schema = score_schema(["darkness"])
    write_table(path, schema, [pa.record_batch([*columns, failure], schema=schema)], ABOUT_SCORES)
    return path


def write_rollouts(path, keys, shape=(1, 2, 2), precision="float32"):
    """A shard whose latents hold prompt id and sample, so that a row can be recognised."""
    latents = torch.zeros(len(keys), *shape)
    latents[:, 0, 0, :2] = torch.tensor(keys)
    prompt_ids, samples = zip(*keys, strict=True)
    batches = [
        rollout_batch(prompt_ids[rows], samples[rows], 0, latents[rows], [b""] * len(latents[rows]), precision)
        for rows in (slice(start, start + 5) for start in range(0, len(keys), 5))
    ]
    write_table(
        path, rollout_schema(shape, precision), batches, {"seconds": {"rollout": 3.0}} | layout_metadata(shape, precision)
    )
    return path


KEYS = [[(p, s) for p in prompts for s in range(4)] for prompts in ([0, 2], [1, 3])]
REWARDS = [[0.1, 0.5, 0.2, NAN, 0.3, 0.3, 0.3, 0.3], [0.0, 1.0, 0.5, 0.25, 0.9, NAN, NAN, NAN]]
KEPT = {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)}


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_advantages_are_over_all_shards_and_leave_out_what_says_nothing(ctx, tmp_path, order):
    scores = [write_scores(tmp_path / f"{i}.parquet", KEYS[i], REWARDS[i]) for i in order]
    metrics = write_advantages(ctx, scores, tmp_path / "advantages.parquet")
    rewards, prompt_ids = np.array(REWARDS[0] + REWARDS[1]), np.array([p for keys in KEYS for p, _ in keys])
    expected = compute_advantages({"darkness": rewards}, {"darkness": 1.0}, prompt_ids, ctx.config.advantages)
    by_key = dict(zip(KEYS[0] + KEYS[1], expected.values, strict=True))
    table = read_table(tmp_path / "advantages.parquet", ADVANTAGES).to_pylist()
    assert {(row["prompt_id"], row["sample"]) for row in table} == KEPT
    for row in table:
        assert row["advantage"] == pytest.approx(by_key[row["prompt_id"], row["sample"]], abs=1e-6)
    assert metrics == pytest.approx(expected.metrics, abs=1e-6)
    assert metrics["group/dropped_samples"] == 9
    assert metrics["group/zero_std_share"] == 0.5
    said = read_table_metadata(tmp_path / "advantages.parquet")
    assert said["metrics"] == metrics
    assert said["seconds"] == {"scoring": 4.0}


class Watched:
    """A updater that keeps a record of what it was given and learns nothing."""

    def __init__(self):
        self.calls, self.alarms, self.schedule = [], [], torch.tensor([1, 2 / 3, 1 / 3, 0])
        self.policy = SimpleNamespace(context_parallel=1, model=None)

    @property
    def updates(self):
        return len(self.calls)

    def update(self, batch, passes):
        keys = [(int(row[0, 0, 0]), int(row[0, 0, 1])) for row in batch.clean]
        assert keys == list(zip(batch.keys.prompt_ids, batch.keys.samples, strict=True))
        self.calls.append(SimpleNamespace(keys=keys, batch=batch, passes=passes))
        return {"loss": 0.0}


@pytest.fixture
def stored(tmp_path):
    """``stored(sizes)``: shards of that many rows, two samples a prompt, and advantages for all rows but every fifth."""

    def store(*sizes, precision="float32"):
        keys = [(row // 2, row % 2) for row in range(sum(sizes))]
        parts = np.split(np.array(keys), np.cumsum(sizes)[:-1])
        rollouts = [
            write_rollouts(tmp_path / f"r{i}.parquet", part.tolist(), precision=precision) for i, part in enumerate(parts)
        ]
        kept = [key for row, key in enumerate(keys) if row % 5]
        columns = [pa.array([p for p, _ in kept]), pa.array([s for _, s in kept])]
        columns.append(pa.array([100.0 * p + s for p, s in kept], pa.float32()))
        about = {"seconds": {"scoring": 1.0}}
        write_table(tmp_path / "a.parquet", ADVANTAGES, [pa.record_batch(columns, schema=ADVANTAGES)], about)
        return rollouts, tmp_path / "a.parquet", kept

    return store


@pytest.fixture
def run(make_prompts, model):
    """Train on stored shards with the updates watched; returns (record, what they were given)."""

    def train(ctx, rollouts, advantages, recorder=None):
        updater = Watched()
        return train_epochs(
            ctx, model, updater, make_prompts(40), rollouts, advantages, recorder or MetricsRecorder()
        ), updater.calls

    return train


@pytest.fixture
def pretend(monkeypatch):
    """``pretend(rank, world)``: be one of several processes."""

    def one_of(rank, world):
        monkeypatch.setattr(offline.Ranks, "current", staticmethod(lambda: Ranks(rank, world)))
        monkeypatch.setattr(offline, "_encode_together", lambda ctx, model, prompts, ranks: encode_once(model, prompts))

    return one_of


def test_an_epoch_covers_every_kept_row_once_in_equal_batches(make_recipe, stored, run):
    ctx = StageContext(make_recipe(offline={"epochs": 3, "batch_size": 8, "micro_batch": 3}), 0, 1)
    rollouts, advantages, kept = stored(24, 12)
    recorder = MetricsRecorder()
    record, seen = run(ctx, rollouts, advantages, recorder)
    per_epoch, draws = len(seen) // 3, ctx.config.hyper.noise_levels
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
    assert [(row["step"], row["epoch"]) for row in recorder.metrics] == [(i, i // per_epoch) for i in range(3 * per_epoch)]
    assert record.optimizer_steps == len(seen)
    assert record.samples == 36
    assert record.seconds.keys() == {"rollout", "scoring", "training"}
    assert record.seconds["rollout"] == 6


def test_batches_of_a_shard_differ_by_one_sample_at_most(make_recipe, stored, run):
    ctx = StageContext(make_recipe(offline={"epochs": 1, "batch_size": 8, "shards": 1}), 0, 1)
    sizes = sorted(len(call.keys) // 2 for call in run(ctx, *stored(26)[:2])[1])  # two draws a sample
    assert sizes == [6, 7, 7]


def keys_seen(ran):
    return [call.keys for call in ran[1]]


def test_the_order_is_seeded_and_new_in_every_epoch(make_recipe, stored, run):
    ctx = StageContext(make_recipe(offline={"epochs": 2}), 0, 1)
    shards = stored(24, 12)[:2]
    first = keys_seen(run(ctx, *shards))
    assert keys_seen(run(ctx, *shards)) == first
    assert first[: len(first) // 2] != first[len(first) // 2 :]
    assert keys_seen(run(StageContext(make_recipe(seed=1, offline={"epochs": 2}), 0, 1), *shards)) != first


@pytest.mark.parametrize("algorithm", ["diffusion_nft", "dgpo", "diffusion_dpo"])
def test_the_order_of_the_advantages_does_not_matter(make_recipe, stored, run, tmp_path, algorithm):
    ctx = StageContext(make_recipe(offline={"algorithm": {"name": algorithm}}), 0, 1)
    rollouts, advantages, _ = stored(24, 12)
    first = keys_seen(run(ctx, rollouts, advantages))
    table = read_table(advantages)
    shuffled = table.take(np.random.default_rng(0).permutation(len(table))).combine_chunks()
    write_table(tmp_path / "shuffled", ADVANTAGES, shuffled.to_batches(), read_table_metadata(advantages))
    assert keys_seen(run(ctx, rollouts, tmp_path / "shuffled")) == first


def test_every_epoch_draws_noise_of_its_own(make_recipe, stored, run):
    ctx = StageContext(make_recipe(offline={"epochs": 2}), 0, 1)
    noise = [tuple(row.flatten().tolist()) for call in run(ctx, *stored(12)[:2])[1] for row in call.batch.noise]
    assert len(set(noise)) == len(noise)


def test_noise_levels_of_a_schedule_are_the_samplers(ctx, stored, run):
    calls = run(ctx, *stored(12)[:2])[1]
    sigmas = torch.cat([call.batch.inputs.sigma for call in calls])
    assert sorted(sigmas.unique().tolist()) == sorted(Watched().schedule[:-1].tolist())


def units_seen(call):
    """The samples of each unit, better first, with the sigma that they share."""
    found = {}
    for key, group_index, sigma in zip(call.keys, call.batch.group_index.tolist(), call.batch.inputs.sigma.tolist(), strict=True):
        found.setdefault((group_index, sigma), []).append(key)
    return Counter((sigma, tuple(members)) for (_, sigma), members in found.items())


@pytest.mark.parametrize("algorithm", ["diffusion_nft", "dgpo", "diffusion_dpo"])
@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_each_batch_and_tear_no_unit(make_recipe, stored, run, pretend, world, algorithm):
    ctx = StageContext(make_recipe(offline={"epochs": 1, "micro_batch": 2, "algorithm": {"name": algorithm}}), 0, 1)
    shards = stored(24, 12)[:2]
    alone, shares = run(ctx, *shards)[1], []
    for rank in range(world):
        pretend(rank, world)
        shares.append(run(ctx, *shards)[1])
    for step, call in enumerate(alone):
        parts = [share[step] for share in shares]
        assert sum((units_seen(part) for part in parts), Counter()) == units_seen(call)
        assert len({part.passes for part in parts}) == 1
    sizes = {len(members) for call in alone for _, members in units_seen(call)}
    assert sizes == {"diffusion_nft": {1}, "dgpo": {1, 2}, "diffusion_dpo": {2}}[algorithm]


@pytest.mark.parametrize("algorithm", ["diffusion_nft", "dgpo", "diffusion_dpo"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("batch_size", "micro_batch"), [(3, 1), (8, 1), (1, 1)])
def test_every_process_has_work_in_every_pass(make_recipe, stored, run, pretend, rank, batch_size, micro_batch, algorithm):
    # A process that runs out of rows before the others would fail alone and leave them waiting.
    settings = {"epochs": 1, "batch_size": batch_size, "micro_batch": micro_batch}
    ctx = StageContext(make_recipe(offline=settings | {"algorithm": {"name": algorithm, "noise_levels": 1}}), 0, 1)
    pretend(rank, 2)
    calls = run(ctx, *stored(14)[:2])[1]
    assert calls
    for call in calls:
        assert len(call.batch.group_index.unique()) >= call.passes >= 1


def test_the_passes_are_those_of_the_largest_share(make_recipe, stored, run, pretend):
    """Seven groups of two on two processes, a group a pass: four on one, three on the other, and three passes on both."""
    keys = {"name": "dgpo", "noise_levels": 1}
    ctx = StageContext(make_recipe(offline={"epochs": 1, "batch_size": 100, "micro_batch": 2, "algorithm": keys}), 0, 1)
    shards, found = stored(14)[:2], []
    for rank in range(2):
        pretend(rank, 2)
        (call,) = run(ctx, *shards)[1]
        found.append((len(call.batch.group_index.unique()), call.passes))
    assert found == [(4, 3), (3, 3)]


@pytest.fixture
def reads(monkeypatch):
    """Every shard that is read: its name, the rows asked for, and weak references to their latents."""
    found, read = [], offline.read_latent_parts

    def remembered(path, parts, stopped):
        latents = read(path, parts, stopped)
        found.append(SimpleNamespace(name=path.name, rows=parts, latents=[weakref.ref(values) for values in latents]))
        return latents

    monkeypatch.setattr(offline, "read_latent_parts", remembered)
    return found


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_shard_is_freed_batch_by_batch_and_the_next_one_read_meanwhile(make_recipe, stored, run, reads, monkeypatch, precision):
    ctx = StageContext(make_recipe(offline={"epochs": 2, "batch_size": 4}), 0, 1)
    update, seen = Watched.update, []

    def watch(updater, batch, passes):
        alive = [sum(values() is not None for values in read.latents) / len(read.latents) for read in reads]
        seen.append((len(reads), sum(alive)))
        return update(updater, batch, passes)

    monkeypatch.setattr(Watched, "update", watch)
    run(ctx, *stored(20, 20, precision=precision)[:2])
    assert [len(read.latents) for read in reads] == [4] * 4
    for step, (started, alive) in enumerate(seen):
        visit, batch = divmod(step, 4)
        assert started <= visit + 1 + (batch >= 2)
        # The rest of this shard, the batch before this one where it is not yet overwritten, and perhaps the next shard.
        assert alive <= (4 - batch + (step > 0)) / 4 + (batch >= 2)


@pytest.mark.parametrize("world", [2, 3])
def test_every_process_reads_its_own_rows_alone(make_recipe, stored, run, pretend, reads, world):
    ctx = StageContext(make_recipe(offline={"epochs": 1}), 0, 1)
    shards = stored(24, 12)[:2]
    for rank in range(world):
        pretend(rank, world)
        run(ctx, *shards)
    for name, kept in (("r0.parquet", 19), ("r1.parquet", 9)):
        rows = [row for read in reads if read.name == name for part in read.rows for row in part.tolist()]
        assert len(rows) == len(set(rows)) == kept


def test_a_stage_that_ends_early_reads_no_further(ctx, stored, reads):
    shards = offline._trainable_shards(ctx, *stored(24, 12)[:2])
    batches = offline._with_latents(offline._schedule(ctx, shards, Ranks(0, 1)), Ranks(0, 1))
    next(batches)
    batches.close()
    assert len(reads) <= 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read_shard")]


def test_a_damaged_shard_ends_the_stage_from_the_thread_that_reads(make_recipe, stored, run):
    ctx, (rollouts, advantages, _) = StageContext(make_recipe(offline={"epochs": 1}), 0, 1), stored(24, 12)
    content = bytearray(rollouts[1].read_bytes())
    with pq.ParquetFile(rollouts[1]) as file:
        column = file.metadata.row_group(1).column(file.schema_arrow.get_field_index("latent"))
    content[column.data_page_offset + column.total_compressed_size - 3] ^= 0xFF
    rollouts[1].write_bytes(content)
    with pytest.raises(TableError, match=r"r1\.parquet is no whole Parquet file"):
        run(ctx, rollouts, advantages)


def test_all_shards_are_joined_with_the_advantages_at_once(ctx, stored, monkeypatch):
    opened, read = [], offline.read_table
    monkeypatch.setattr(offline, "read_table", lambda *arguments: opened.append(arguments) or read(*arguments))
    rollouts, advantages, kept = stored(7, 5, 3, 6)
    shards = offline._trainable_shards(ctx, rollouts, advantages)
    assert len(opened) == 1
    assert [list(zip(s.prompt_ids.tolist(), s.samples.tolist(), strict=True)) for s in shards] == [
        [key for key in kept if start <= 2 * key[0] + key[1] < end] for start, end in pairwise([0, 7, 12, 15, 21])
    ]
    for shard, start in zip(shards, (0, 7, 12, 15), strict=True):
        assert (shard.rows + start).tolist() == [2 * p + s for p, s in zip(shard.prompt_ids, shard.samples, strict=True)]


def test_pairs_are_the_better_and_the_worse_of_a_prompt(make_recipe, stored, run):
    ctx = StageContext(make_recipe(offline={"algorithm": {"name": "diffusion_dpo"}}), 0, 1)
    for call in run(ctx, *stored(24, 12)[:2])[1]:
        for better, worse in zip(call.keys[::2], call.keys[1::2], strict=True):
            assert better == (worse[0], 1)  # the advantage is 100 * prompt + sample
            assert worse[1] == 0


def test_shards_too_small_for_every_process_are_named_and_left_out(ctx, stored, run, pretend):
    pretend(0, 4)
    rollouts, advantages, _ = stored(20, 3)
    with pytest.warns(UserWarning, match=r"fewer samples, pairs or groups to train on than the 4 processes: r1\.parquet \("):
        record, calls = run(ctx, rollouts, advantages)
    assert "r1.parquet" in record.alarms[0]
    assert {key for call in calls for key in call.keys} <= {(p, s) for p in range(10) for s in range(2)}


def test_shards_that_are_all_too_small_are_refused(ctx, stored, run, pretend):
    pretend(0, 4)
    rollouts, advantages, _ = stored(3, 3)
    with pytest.raises(TrainingError, match=r"than the 4 processes: r0.parquet \(\d\), r1.parquet.*lower the stage's 'shards'"):
        run(ctx, rollouts, advantages)


def test_nothing_kept_trains_nothing(ctx, stored, run, tmp_path):
    rollouts, _, _ = stored(8, 8)
    scores = [write_scores(tmp_path / "s.parquet", [(p, s) for p in range(8) for s in range(2)], [0.5] * 14 + [NAN] * 2)]
    metrics = write_advantages(ctx, scores, tmp_path / "none.parquet")
    assert metrics["group/dropped_samples"] == 16
    with pytest.warns(UserWarning, match="nothing was learnt: no group has samples that score differently"):
        record, calls = run(ctx, rollouts, tmp_path / "none.parquet")
    assert record.optimizer_steps == 0
    assert record.samples == 16
    assert record.alarms == ["nothing was learnt: no group has samples that score differently"]
    assert not calls


def test_a_warmup_as_long_as_the_stage_is_refused(make_recipe, stored, run):
    """Two epochs of 24 rows, of which 19 have an advantage: three batches of at most 8."""

    def warming_up(updates):
        return StageContext(make_recipe(offline={"optimizer": {"schedule": {"warmup": updates}}}), 0, 1)

    rollouts, advantages, _ = stored(24)
    with pytest.raises(
        TrainingError, match=r"optimizer.schedule.warmup = 6 takes the whole stage of 6 optimiser steps; lower it"
    ):
        run(warming_up(6), rollouts, advantages)
    assert len(run(warming_up(5), rollouts, advantages)[1]) == 6


@pytest.fixture(scope="module")
def generated(make_recipe, base_folder, scorer, make_prompts, tmp_path_factory):
    """Rollouts, scores and advantages of a whole tiny stage, made with the base."""
    ctx, model, tmp_path = StageContext(make_recipe(), 0, 1), load_model(base_folder), tmp_path_factory.mktemp("generated")
    policy = Policy(model, ctx.recipe.policy, 0)
    policy.ensure("old")
    rollouts, scores = [tmp_path / f"r{i}" for i in range(2)], [tmp_path / f"s{i}" for i in range(2)]
    for shard in range(2):
        generate_shard(ctx, model, policy, 0, make_prompts(6), shard, rollouts[shard])
        score_shard(ctx, scorer, make_prompts(6), rollouts[shard], scores[shard])
    write_advantages(ctx, scores, tmp_path / "advantages")
    return rollouts, tmp_path / "advantages"


@pytest.mark.parametrize("config", [PolicyConfig(), PolicyConfig(train="lora", rank=4, alpha=8)], ids=["full", "lora"])
@pytest.mark.parametrize("name", FORWARD)
def test_every_forward_algorithm_trains_on_stored_samples(make_recipe, base_folder, generated, make_prompts, name, config):
    ctx, model = StageContext(make_recipe(offline={"algorithm": {"name": name}}), 0, 1), load_model(base_folder)
    policy = Policy(model, config, 0)
    policy.ensure("old")
    start = {key: value.detach().clone() for key, value in policy.parameters.items()}
    recorder, updater = MetricsRecorder(), PolicyUpdater(policy, ctx.offline)
    record = train_epochs(ctx, model, updater, make_prompts(6), *generated, recorder)
    logged = recorder.metrics
    assert record.label == "1.2 offline"
    assert record.algorithm == name
    assert record.samples == 16
    assert record.optimizer_steps == len(logged) == 4
    assert record.alarms == []
    assert record.seconds.keys() == {"rollout", "scoring", "training"}
    assert any(not torch.equal(value, start[key]) for key, value in policy.parameters.items())
    assert all(torch.equal(value, start[key]) for key, value in policy.copies["reference"].items())
    old_moved = any(not torch.equal(value, start[key]) for key, value in policy.copies["old"].items())
    assert old_moved == (name == "awm")
    names = {"loss", "grad_norm", "lr", "velocity_drift", "alarm/velocity_drift"}
    assert names | {"epoch", "seconds/training", "ms_per_image/training"} <= logged[0].keys()
    assert all(np.isfinite(value) for metrics in logged for value in metrics.values())


def test_the_old_policy_is_where_training_began(ctx, base_folder, generated, make_prompts):
    model, recorder = load_model(base_folder), MetricsRecorder()
    policy = Policy(model, ctx.recipe.policy, 0)
    policy.ensure("old")
    updater = PolicyUpdater(policy, ctx.offline)
    train_epochs(ctx, model, updater, make_prompts(6), *generated, recorder)
    assert recorder.metrics[0]["nft/old_deviation"] == pytest.approx(0, abs=1e-9)
    assert recorder.metrics[-1]["nft/old_deviation"] > 1e-9


def test_the_drift_alarm_stands_in_the_record(make_recipe, base_folder, generated, make_prompts):
    ctx, model = StageContext(make_recipe(offline={"drift_alarm": 1e-9}), 0, 1), load_model(base_folder)
    policy = Policy(model, ctx.recipe.policy, 0)
    policy.ensure("old")
    updater = PolicyUpdater(policy, ctx.offline)
    with pytest.warns(UserWarning, match="velocity drift") as warned:
        record = train_epochs(ctx, model, updater, make_prompts(6), *generated, MetricsRecorder())
    assert len(warned) == len(record.alarms) == 1


@pytest.fixture
def folders(ctx, base_folder, make_prompts, tmp_path):
    """The base policy folder and the prompt table."""
    write_base_policy(tmp_path / "start", verify(base_folder), ctx.recipe.digest, ctx.recipe.policy)
    write_prompts(pa.Table.from_pylist([vars(prompt) for prompt in make_prompts(6)], PROMPTS), tmp_path / "prompts.parquet")
    return tmp_path / "start", tmp_path / "prompts.parquet"


def test_the_stage_repeats_itself_byte_for_byte_and_hands_on_a_whole_folder(ctx, base_folder, generated, folders, tmp_path):
    start, prompts = folders
    for name in ("one", "two"):
        train_offline_folder(ctx, base_folder, start, prompts, *generated, tmp_path / name, MetricsRecorder())
    assert verify(tmp_path / "one") == verify(tmp_path / "two")
    metadata = read_policy_metadata(tmp_path / "one")
    assert (metadata.version, metadata.copies, metadata.stages) == (4, ("old",), ("1.2 offline",))
    assert metadata.progress == Progress(algorithm="diffusion_nft", steps=0, updates=4)
    assert metadata.base_digest == verify(base_folder)
    assert metadata.recipe_digest == ctx.recipe.digest


def test_the_next_stage_generates_with_what_this_one_trained(ctx, base_folder, generated, folders, tmp_path):
    start, prompts = folders
    train_offline_folder(ctx, base_folder, start, prompts, *generated, tmp_path / "trained", MetricsRecorder())
    following = StageContext(ctx.recipe, ctx.round + 1, ctx.stage)
    policy, _ = open_policy(following, load_model(base_folder), tmp_path / "trained")
    with policy.using(following.algorithm.generates):
        generating = {name: value.detach().clone() for name, value in policy.parameters.items()}
    assert any(not torch.equal(value, policy.copies["reference"][name]) for name, value in generating.items())


def test_a_stage_with_nothing_to_train_hands_on_the_policy_it_got(ctx, base_folder, generated, folders, tmp_path):
    start, prompts = folders
    write_table(tmp_path / "none", ADVANTAGES, [], {"seconds": {"scoring": 1.0}})
    with pytest.warns(UserWarning, match="nothing was learnt"):
        train_offline_folder(
            ctx, base_folder, start, prompts, generated[0], tmp_path / "none", tmp_path / "trained", MetricsRecorder()
        )
    assert read_policy_metadata(tmp_path / "trained").version == 0
    policy, _ = open_policy(ctx, load_model(base_folder), tmp_path / "trained")
    assert all(torch.equal(value, policy.copies["reference"][name]) for name, value in policy.parameters.items())


def test_the_noise_of_a_sample_is_its_own(ctx, stored, run):
    call = run(ctx, *stored(12)[:2])[1][0]
    first = slice(0, 1)
    keys = SampleKeys(ctx.seed, [call.keys[0][0]], [call.keys[0][1]])
    conditioning = call.batch.inputs.conditioning.rows(first)
    clean, advantage = call.batch.clean[first], call.batch.advantage[first]
    alone = forward_batch(
        clean, conditioning, advantage, keys, np.array([0]), ctx.config.hyper, torch.tensor([1, 2 / 3, 1 / 3, 0]), visit=0
    )
    assert torch.equal(alone.noise[0], call.batch.noise[0])
