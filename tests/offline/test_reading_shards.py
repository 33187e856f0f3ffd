"""How the rows of an epoch are read: a shard ahead, and no further than they are needed."""

from __future__ import annotations

import threading
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from offline_cases import Watched

from ebbflow.offline import batches
from ebbflow.stage import StageContext
from ebbflow.storage.tables import TableError
from ebbflow.training.distributed import Ranks


@pytest.fixture
def reads(monkeypatch):
    """Every shard that is read: its name, the rows asked for, and weak references to their
    latents."""
    found = []
    read = batches.read_latent_parts

    def remembered(path, parts, stopped):
        latents = read(path, parts, stopped)
        found.append(
            SimpleNamespace(
                name=path.name, rows=parts, latents=[weakref.ref(values) for values in latents]
            )
        )
        return latents

    monkeypatch.setattr(batches, "read_latent_parts", remembered)
    return found


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_shard_is_freed_batch_by_batch_and_the_next_one_read_meanwhile(
    make_recipe, stored, run, reads, monkeypatch, precision
):
    ctx = StageContext(make_recipe(offline={"epochs": 2, "batch_size": 4}), 0, 1)
    update_policy = Watched.update_policy
    seen = []

    def watch(updater, batch, passes):
        alive = [
            sum(values() is not None for values in read.latents) / len(read.latents)
            for read in reads
        ]
        seen.append((len(reads), sum(alive)))
        return update_policy(updater, batch, passes)

    monkeypatch.setattr(Watched, "update_policy", watch)
    run(ctx, *stored(20, 20, precision=precision)[:2])
    assert [len(read.latents) for read in reads] == [4] * 4
    for step, (started, alive) in enumerate(seen):
        visit, batch = divmod(step, 4)
        assert started <= visit + 1 + (batch >= 2)
        # The rest of this shard, the batch before this one where it is not yet overwritten, and
        # perhaps the next shard.
        assert alive <= (4 - batch + (step > 0)) / 4 + (batch >= 2)


@pytest.mark.parametrize("world", [2, 3])
def test_every_process_reads_its_own_rows_alone(make_recipe, stored, run, pretend, reads, world):
    ctx = StageContext(make_recipe(offline={"epochs": 1}), 0, 1)
    shards = stored(24, 12)[:2]
    for rank in range(world):
        pretend(rank, world)
        run(ctx, *shards)
    for name, kept in (("r0.parquet", 19), ("r1.parquet", 9)):
        rows = [
            row
            for read in reads
            if read.name == name
            for part in read.rows
            for row in part.tolist()
        ]
        assert len(rows) == len(set(rows)) == kept


def test_a_stage_that_ends_early_reads_no_further(ctx, stored, reads):
    shards = batches.list_trainable_shards(ctx, *stored(24, 12)[:2])
    loaded = batches._load_latents(batches._iterate_visits(ctx, shards, Ranks(0, 1)), Ranks(0, 1))
    next(loaded)
    loaded.close()
    assert len(reads) <= 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read_shard")]


def test_a_damaged_shard_ends_the_stage_from_the_thread_that_reads(make_recipe, stored, run):
    ctx, (rollouts, advantages, _) = (
        StageContext(make_recipe(offline={"epochs": 1}), 0, 1),
        stored(24, 12),
    )
    content = bytearray(rollouts[1].read_bytes())
    with pq.ParquetFile(rollouts[1]) as file:
        column = file.metadata.row_group(1).column(file.schema_arrow.get_field_index("latent"))
    content[column.data_page_offset + column.total_compressed_size - 3] ^= 0xFF
    rollouts[1].write_bytes(content)
    with pytest.raises(TableError, match=r"r1\.parquet is no whole Parquet file"):
        run(ctx, rollouts, advantages)


def test_all_shards_are_joined_with_the_advantages_at_once(ctx, stored, monkeypatch):
    opened = []
    read = batches.read_table
    monkeypatch.setattr(
        batches, "read_table", lambda *arguments: opened.append(arguments) or read(*arguments)
    )
    rollouts, advantages, kept = stored(7, 5, 3, 6)
    shards = batches.list_trainable_shards(ctx, rollouts, advantages)
    assert len(opened) == 1
    assert [list(zip(s.prompt_ids.tolist(), s.samples.tolist(), strict=True)) for s in shards] == [
        [key for key in kept if start <= 2 * key[0] + key[1] < end]
        for start, end in pairwise([0, 7, 12, 15, 21])
    ]
    for shard, start in zip(shards, (0, 7, 12, 15), strict=True):
        assert (shard.rows + start).tolist() == [
            2 * p + s for p, s in zip(shard.prompt_ids, shard.samples, strict=True)
        ]
