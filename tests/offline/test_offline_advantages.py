"""What the advantages table of an offline stage holds."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from offline_cases import write_scores

from ebbflow.algorithms.advantages import compute_advantages
from ebbflow.data.schema import ADVANTAGES
from ebbflow.offline.advantages import write_advantages
from ebbflow.offline.shards import SCORES_DIGEST
from ebbflow.stage import StageContext
from ebbflow.storage.tables import (
    TableError,
    compute_content_digest,
    read_table,
    read_table_metadata,
    write_table,
)

NAN = float("nan")
KEYS = [[(p, s) for p in prompts for s in range(4)] for prompts in ([0, 2], [1, 3])]
REWARDS = [[0.1, 0.5, 0.2, NAN, 0.3, 0.3, 0.3, 0.3], [0.0, 1.0, 0.5, 0.25, 0.9, NAN, NAN, NAN]]
KEPT = {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)}


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_advantages_are_over_all_shards_and_leave_out_what_says_nothing(ctx, tmp_path, order):
    scores = [write_scores(ctx, i, tmp_path / f"{i}.parquet", KEYS[i], REWARDS[i]) for i in order]
    metrics = write_advantages(ctx, scores, tmp_path / "advantages.parquet")
    rewards = np.array(REWARDS[0] + REWARDS[1])
    prompt_ids = np.array([p for keys in KEYS for p, _ in keys])
    expected = compute_advantages(
        {"darkness": rewards}, {"darkness": 1.0}, prompt_ids, ctx.config.advantages
    )
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


@pytest.fixture
def scores(ctx, tmp_path):
    """The scores of both shards of the stage."""
    return [
        write_scores(ctx, shard, tmp_path / f"scores-{shard}.parquet", KEYS[shard], REWARDS[shard])
        for shard in range(2)
    ]


def change_table(path, change, digest=False):
    """Rewrite a table of scores with its metadata; with ``digest``, as one that was scored so."""
    table = change(read_table(path))
    metadata = read_table_metadata(path)
    if digest:
        metadata[SCORES_DIGEST] = compute_content_digest(table)
    write_table(path, table.schema, table.to_batches(), metadata)


def negate(table, *names):
    for name in names:
        table = table.set_column(
            table.column_names.index(name), name, pc.negate_checked(table[name])
        )
    return table


@pytest.mark.parametrize("shards", [[0], [0, 0], [0, 1, 1], []])
def test_advantages_need_the_scores_of_each_shard_once(ctx, scores, tmp_path, shards):
    with pytest.raises(TableError, match=r"has the shards \[0, 1\], and there are scores of"):
        write_advantages(ctx, [scores[shard] for shard in shards], tmp_path / "a.parquet")
    assert not (tmp_path / "a.parquet").exists()


@pytest.mark.parametrize("other", ["stage", "recipe_digest"])
def test_scores_of_another_stage_or_recipe_are_refused(make_recipe, ctx, scores, tmp_path, other):
    contexts = {
        "stage": StageContext(ctx.recipe, round=1, stage=1),
        "recipe_digest": StageContext(make_recipe(max_failed_share=0.9), round=0, stage=1),
    }
    with pytest.raises(TableError, match=f"a table of scores of something else: .*{other} = "):
        write_advantages(contexts[other], scores, tmp_path / "a.parquet")


CHANGES = {
    "inverted": lambda table: negate(table, "reward", "darkness"),
    "inverted reward": lambda table: negate(table, "reward"),
    "a row less": lambda table: table.slice(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_scores_that_were_changed_are_refused(ctx, scores, tmp_path, change):
    change_table(scores[1], change)
    with pytest.raises(TableError, match="was changed since it was scored"):
        write_advantages(ctx, scores, tmp_path / "a.parquet")


def test_a_reward_that_is_not_its_weighted_sum_is_refused(ctx, scores, tmp_path):
    change_table(scores[0], CHANGES["inverted reward"], digest=True)
    with pytest.raises(TableError, match=r"7 rewards are not the weighted sum .* = \[0, 0\]"):
        write_advantages(ctx, scores, tmp_path / "a.parquet")


def test_a_sample_that_two_shards_scored_is_refused(ctx, scores, tmp_path):
    change_table(scores[1], lambda table: pa.concat_tables([table, table.slice(0, 1)]), digest=True)
    with pytest.raises(TableError, match=r"\(prompt_id, sample\) = \[1, 0\] was scored 2 times"):
        write_advantages(ctx, scores, tmp_path / "a.parquet")
