"""The advantages of an offline stage's samples: computed once, over all shards."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from ebbflow.algorithms.advantages import compute_advantages
from ebbflow.data.schema import ADVANTAGES, KEY
from ebbflow.offline.shards import SCORES_DIGEST, require_stage_identity, sum_phase_seconds
from ebbflow.stage import StageContext
from ebbflow.storage.tables import (
    TableError,
    compute_content_digest,
    read_table,
    read_table_metadata,
    write_table,
)

ROUNDING = 1e-9
"""Relative difference that a weighted sum may have where it is computed again."""


def write_advantages(ctx: StageContext, scores: list[Path], path: Path) -> dict[str, float]:
    """Write the advantages of every sample worth training on, over all shards; return their
    statistics.

    Samples without a score and groups without variance are left out and counted in the statistics.

    Args:
        scores: the tables of scores of all shards of the stage, each once, in any order.

    Raises:
        TableError: a table is damaged, changed or of another stage, or a shard or a sample is
            missing or there twice.
    """
    weights = _check_shard_set(ctx, scores)
    # Advantages may be normalised over all samples of the stage, so all shards are read at once: a
    # few numbers for each sample, no images and no latents.
    table = pa.concat_tables(
        [_read_scores(shard, weights).select([*KEY, "reward", *weights]) for shard in scores]
    )
    prompt_ids = table["prompt_id"].to_numpy()
    _check_unique_keys(ctx, prompt_ids, table["sample"].to_numpy())
    rewards = {name: table[name].to_numpy() for name in weights}
    scored = np.isfinite(table["reward"].to_numpy())
    result = compute_advantages(rewards, weights, prompt_ids, ctx.config.advantages, scored=scored)
    columns = [prompt_ids, table["sample"].to_numpy(), result.values]
    batch = pa.record_batch(
        [pa.array(column[result.keep]) for column in columns], schema=ADVANTAGES
    )
    about = {
        "stage": ctx.stage_label,
        "metrics": result.metrics,
        "seconds": sum_phase_seconds(scores, "scoring"),
    }
    write_table(path, ADVANTAGES, [batch], about)
    return result.metrics


def _check_shard_set(ctx: StageContext, scores: list[Path]) -> dict[str, float]:
    """Check that the tables are those of this stage, one for each of its shards; return the weights
    that they were scored with.
    """
    # The weights that the samples were scored with, so that no key of the recipe is read twice.
    weights: dict[str, float] = {}
    shards = []
    for path in scores:
        metadata = read_table_metadata(path)
        require_stage_identity(ctx, path, metadata, "a table of scores")
        if weights and metadata["weights"] != weights:
            raise TableError(
                f"{path} was scored with the weights {metadata['weights']}, the other shards with"
                f" {weights}; score it again"
            )
        weights = metadata["weights"]
        shards.append(metadata["shard"])
    expected = list(range(ctx.offline_config.shards))
    if sorted(shards) != expected:
        missing = sorted(set(expected) - set(shards))
        raise TableError(
            f"{ctx.stage_label} has the shards {expected}, and there are scores of"
            f" {sorted(shards)} (missing: {missing}); give the scores of each shard once"
        )
    return weights


def _read_scores(path: Path, weights: Mapping[str, float]) -> pa.Table:
    """Read a table of scores, and check that it holds what scoring wrote."""
    table = read_table(path)
    metadata = read_table_metadata(path)
    if compute_content_digest(table) != metadata.get(SCORES_DIGEST):
        raise TableError(
            f"{path} was changed since it was scored: its values do not match its digest; score the"
            " shard again"
        )
    reward = table["reward"].to_numpy()
    total = _compute_weighted_sum(table, weights, metadata["of_sets"])
    scored = np.isfinite(reward)
    wrong = np.flatnonzero(scored & ~np.isclose(total, reward, ROUNDING, ROUNDING))
    if len(wrong):
        key = [table[name][int(wrong[0])].as_py() for name in KEY]
        raise TableError(
            f"{path}: {len(wrong)} rewards are not the weighted sum of their scores, first that of"
            f" (prompt_id, sample) = {key}; score the shard again"
        )
    return table


def _compute_weighted_sum(
    table: pa.Table, weights: Mapping[str, float], of_sets: Collection[str]
) -> np.ndarray:
    """Compute the weighted sum of the scores, float64 [N]; NaN where a reward that scores every
    prompt has none.
    """
    total = np.zeros(table.num_rows)
    for name, weight in weights.items():
        values = weight * np.asarray(table[name].to_numpy(), np.float64)
        # A reward of some prompt sets adds nothing to the prompts of the others.
        total += np.nan_to_num(values) if name in of_sets else values
    return total


def _check_unique_keys(ctx: StageContext, prompt_ids: np.ndarray, samples: np.ndarray) -> None:
    keys, counts = np.unique(np.stack([prompt_ids, samples]), axis=1, return_counts=True)
    if len(counts) and counts.max() > 1:
        key = keys[:, counts.argmax()].tolist()
        raise TableError(
            f"{ctx.stage_label}: (prompt_id, sample) = {key} was scored {counts.max()} times; give"
            " the scores of each shard once"
        )
