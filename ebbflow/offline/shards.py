"""Rollout shards of an offline stage: generated and scored once, one Parquet file each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tqdm import tqdm

from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.sampling import prompt_batch
from ebbflow.data.schema import rollout_schema, score_schema
from ebbflow.data.tables import (
    TableError,
    about_table,
    check_columns,
    nullable,
    read_batches,
    read_column,
    read_schema,
    row_count,
    write_table,
)
from ebbflow.models import Model
from ebbflow.models.encoding import encode_once
from ebbflow.rewards.combine import Scorer, ScoreTable, require_scored
from ebbflow.rollouts.generate import finite_rows, generate
from ebbflow.rollouts.images import decode_png, encode_png
from ebbflow.stage import Place, open_model, open_policy
from ebbflow.timing import Clock
from ebbflow.training.policy import Policy


def generate_shard(
    place: Place, model: Model, policy: Policy, version: int, prompts: list[Prompt], shard: int, path: Path
) -> None:
    """Generate every group of one shard of an offline stage and write it to ``path``.

    Args:
        policy: rolls out with its old copy where the algorithm keeps one.
        version: the policy's version, stored with every sample.
        prompts: the training split; the stage's prompts are chosen from it, and shard i of n gets every n-th.
    """
    config = place.offline
    mine = prompt_batch(prompts, config.prompts, step=0, seed=place.seed)[shard :: config.shards]
    clock = Clock()
    about = _about(place, shard, clock)
    groups_at_once = max(1, config.micro_batch // config.group_size)
    batches = _generated(place, model, policy, version, mine, groups_at_once, clock)
    write_table(path, rollout_schema(model.latent_shape), batches, about)


def generate_shard_from_folders(place: Place, base: Path, folder: Path, prompts: Path, shard: int, path: Path) -> None:
    """``generate_shard`` with the policy of a folder."""
    model = open_model(place.recipe, base)
    policy, card = open_policy(place, model, folder)
    generate_shard(place, model, policy, card.version, read_prompts(prompts, "train"), shard, path)


def _generated(
    place: Place, model: Model, policy: Policy, version: int, prompts: list[Prompt], groups_at_once: int, clock: Clock
) -> Iterator[pa.RecordBatch]:
    schema, config = rollout_schema(model.latent_shape), place.config
    with clock.phase("rollout"):
        encode = encode_once(model, prompts)
    progress = tqdm(total=len(prompts) * config.group_size, desc=f"{place.label} rollout", unit="image", disable=None)
    for start in range(0, len(prompts), groups_at_once):
        with clock.phase("rollout"), policy.using(place.algorithm.generates):
            repeated, keys = place.groups(prompts[start : start + groups_at_once], step=0)
            latents = generate(
                model, encode(repeated), keys, config.sampler, micro_batch=config.micro_batch, precision=config.rollout_precision
            ).latents
            images = encode_png(model.decode(latents))
        progress.update(len(images))
        yield pa.record_batch(
            [
                pa.array(keys.prompt_ids, pa.int64()),
                pa.array(keys.samples, pa.int64()),
                pa.array([version] * len(images), pa.int64()),
                # To Arrow the layout in memory is part of the type, and ours is row by row.
                pa.FixedShapeTensorArray.from_numpy_ndarray(np.array(latents.cpu().numpy(), order="C")),
                pa.array(images, pa.binary()),
            ],
            schema=schema,
        )


def _about(place: Place, shard: int, clock: Clock) -> dict[str, Any]:
    return {
        **made_for(place),
        "shard": shard,
        "engine": "diffusers",
        "dtype": place.config.rollout_precision or place.recipe.model.precision,
        "sampler": place.config.sampler.model_dump(),
        "micro_batch": place.config.micro_batch,
        "seconds": clock.seconds,
    }


def made_for(place: Place) -> dict[str, Any]:
    """What tells the shards of a stage from those of every other."""
    return {"recipe_digest": place.recipe.digest, "stage": place.label, "seed": place.seed}


def require_shard(place: Place, path: Path, prompts: Sequence[Prompt], latent_shape: tuple[int, ...] | None = None) -> None:
    """Check that a file is a rollout shard of this stage, on these prompts; with a shape, that its latents have it.

    Raises:
        TableError: it is not whole, or is something else.
    """
    columns = read_schema(path)
    latent = columns.field("latent").type if "latent" in columns.names else None
    shape = tuple(latent.shape) if isinstance(latent, pa.FixedShapeTensorType) else ()
    check_columns(path, rollout_schema(latent_shape or shape))
    about = about_table(path)
    differ = [
        f"{key} = {about.get(key)!r} (this stage's: {mine!r})" for key, mine in made_for(place).items() if about.get(key) != mine
    ]
    if differ:
        raise TableError(f"{path} is a rollout shard of something else: {', '.join(differ)}; generate it with this recipe")
    known = {prompt.prompt_id for prompt in prompts}
    if strange := set(read_column(path, "prompt_id").to_pylist()) - known:
        raise TableError(f"{path} has samples of prompt_id = {min(strange)}, and the run's prompts have none; generate it again")


def score_shard(place: Place, scorer: Scorer, prompts: list[Prompt], rollouts: Path, path: Path) -> None:
    """Score a rollout shard and write the table of scores; generates nothing.

    A sample whose latent is not finite has no image that could be scored: it is masked and counted like a failure to score.

    Raises:
        TableError: the shard is damaged, or one of another recipe or stage.
        RewardError: more samples than ``rewards.max_failed_share`` could not be scored.
    """
    require_shard(place, rollouts, prompts)
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    clock = Clock()
    with tqdm(total=row_count(rollouts), desc=f"{place.label} scoring", unit="image", disable=None) as progress:
        parts = []
        for batch in read_batches(rollouts, rows=place.config.micro_batch):
            with clock.phase("scoring"):
                finite = finite_rows(torch.from_numpy(batch["latent"].to_numpy_ndarray().copy()))
                scores = scorer(_images(rollouts, batch), [by_id[i] for i in batch["prompt_id"].to_pylist()]).where(finite)
            parts.append((batch.select(["prompt_id", "sample"]), scores))  # the images of a whole shard would fill memory
            progress.update(len(batch))
    scored = ScoreTable.cat([table for _, table in parts])
    require_scored(scored, place.recipe.rewards.max_failed_share)
    schema = score_schema(sorted(scored.metrics))
    about = about_table(rollouts) | {"seconds": clock.seconds, "weights": scorer.weights}
    write_table(path, schema, (_scored(schema, batch, table) for batch, table in parts), about)


def _images(path: Path, batch: pa.RecordBatch) -> np.ndarray:
    try:
        return decode_png(batch["image"].to_pylist())
    except Exception as error:  # of many kinds: every decoder of Pillow has its own
        prompt = batch["prompt_id"][0].as_py()
        raise TableError(f"{path}: images from prompt_id = {prompt} on cannot be read ({error}); generate it again") from None


def _scored(schema: pa.Schema, batch: pa.RecordBatch, table: ScoreTable) -> pa.RecordBatch:
    columns = {"prompt_id": batch["prompt_id"], "sample": batch["sample"], "reward": nullable(table.reward)}
    columns |= {name: nullable(values) for name, values in table.metrics.items()}
    columns["failure"] = pa.array(table.failures, pa.string())
    return pa.record_batch([columns[name] for name in schema.names], schema=schema)


def read_latents(path: Path) -> torch.Tensor:
    """The final latents of a rollout shard, fp32 [N, ...], in the order of its rows."""
    return torch.from_numpy(read_column(path, "latent").combine_chunks().to_numpy_ndarray().copy())
