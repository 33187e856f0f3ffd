"""The scores of an offline stage's rollouts: given once, without a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from ebbflow.data.images import decode_pngs
from ebbflow.data.prompts import Prompt
from ebbflow.data.schema import build_score_schema
from ebbflow.data.sounds import SoundError, Sounds, read_sounds
from ebbflow.offline.shards import SCORES_DIGEST, check_shard, decode_latent, read_layout
from ebbflow.progress import show_progress
from ebbflow.rewards.combine import Scorer, ScoreTable, require_scored_share
from ebbflow.stage import StageContext
from ebbflow.storage.tables import (
    TableError,
    compute_content_digest,
    count_rows,
    nan_to_null,
    read_batches,
    read_table_metadata,
    write_table,
)
from ebbflow.timing import Clock


def score_shard(
    ctx: StageContext, scorer: Scorer, prompts: list[Prompt], rollouts: Path, path: Path
) -> None:
    """Score a rollout shard and write the table of scores; generates nothing.

    A sample whose latent is not finite has no image that could be scored: it is masked and counted
    like a failure to score.

    Raises:
        TableError: the shard is damaged, or one of another recipe or stage.
        RewardError: more samples than ``max_failed_share`` could not be scored.
    """
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    check_shard(ctx, rollouts, by_id.keys())
    clock = Clock()
    with show_progress(
        f"{ctx.stage_label} scoring", "image", total=count_rows(rollouts)
    ) as progress:
        parts = []
        columns = ["prompt_id", "sample", "finite", "image"]
        if scorer.reads_latents:
            columns.append("latent")
        for batch in read_batches(rollouts, _count_rows_at_once(ctx, scorer), columns):
            with clock.measure_phase("scoring"):
                finite = batch["finite"].to_numpy(zero_copy_only=False)
                sample_prompts = [by_id[i] for i in batch["prompt_id"].to_pylist()]
                latents = _decode_latents(rollouts, batch) if scorer.reads_latents else None
                sounds = _decode_sounds(rollouts, batch) if scorer.reads_sounds else None
                scores = scorer(
                    _decode_images(rollouts, batch), sample_prompts, latents, sounds
                ).fail_broken_latents(finite)
            # Keys and scores alone: the images of a whole shard would fill memory.
            parts.append((batch.select(["prompt_id", "sample"]), scores))
            progress.update(len(batch))
    scored = ScoreTable.concatenate([table for _, table in parts])
    require_scored_share(scored, ctx.recipe.max_failed_share)
    # Which metrics there are is known only when all samples are scored: a reward that applies to
    # some prompt sets may be missing in the first batches.
    schema = build_score_schema(sorted(scored.metrics))
    batches = [_build_score_batch(schema, batch, table) for batch, table in parts]
    about = read_table_metadata(rollouts) | {
        "seconds": clock.seconds,
        "weights": scorer.reward_weights,
        # The rewards that score some prompt sets only: elsewhere their columns are empty.
        "of_sets": sorted(scorer.of_sets),
        # Scores that somebody edits or exchanges do not match it (``write_advantages``).
        SCORES_DIGEST: compute_content_digest(pa.Table.from_batches(batches)),
    }
    write_table(path, schema, batches, about)


def _count_rows_at_once(ctx: StageContext, scorer: Scorer) -> int:
    """Count the samples to score together: where a reward compares them, whole groups, which follow
    one another in a shard.
    """
    size = ctx.config.micro_batch
    group = ctx.config.group_size
    return max(1, size // group) * group if scorer.compares_groups else size


def _decode_images(path: Path, batch: pa.RecordBatch) -> np.ndarray:
    try:
        return decode_pngs(batch["image"].to_pylist())
    except Exception as error:  # of many kinds: every decoder of Pillow has its own
        prompt = batch["prompt_id"][0].as_py()
        raise TableError(
            f"{path}: images from prompt_id = {prompt} on cannot be read ({error}); generate it"
            " again"
        ) from None


def _decode_sounds(path: Path, batch: pa.RecordBatch) -> Sounds | None:
    try:
        return read_sounds(batch["image"].to_pylist())
    except SoundError as error:
        raise TableError(f"{path}: the sounds of its samples {error}") from None


def _decode_latents(path: Path, batch: pa.RecordBatch) -> np.ndarray:
    """Decode latents to fp32 [N, ...], with the values that ``latent_precision`` has left."""
    layout = read_layout(path)
    return np.stack([decode_latent(layout, value) for value in batch["latent"].to_pylist()])


def _build_score_batch(
    schema: pa.Schema, batch: pa.RecordBatch, table: ScoreTable
) -> pa.RecordBatch:
    columns = {
        "prompt_id": batch["prompt_id"],
        "sample": batch["sample"],
        "reward": nan_to_null(table.reward),
    }
    # A reward that has no prompt of these says nothing of its metrics.
    none = np.full(len(batch), np.nan)
    columns |= {
        name: nan_to_null(table.metrics.get(name, none))
        for name in schema.names
        if name not in (*columns, "failure")
    }
    columns["failure"] = pa.array(table.failures, pa.string())
    return pa.record_batch([columns[name] for name in schema.names], schema=schema)
