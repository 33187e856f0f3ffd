"""The rollouts of an offline stage: generated once, a Parquet file for each shard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from ebbflow.data.images import encode_png
from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.sampling import prompt_batch
from ebbflow.data.schema import rollout_schema
from ebbflow.models import Model
from ebbflow.models.encoding import encode_once
from ebbflow.offline.shards import shard_identity
from ebbflow.rollouts.generate import generate
from ebbflow.stage import StageContext
from ebbflow.storage.tables import write_table
from ebbflow.timing import Clock
from ebbflow.training.policy import Policy
from ebbflow.training.policy_io import open_model, open_policy


def generate_shard(
    ctx: StageContext, model: Model, policy: Policy, version: int, prompts: list[Prompt], shard: int, path: Path
) -> None:
    """Generate every group of one shard of an offline stage and write it to ``path``.

    Args:
        policy: rolls out with its old copy where the algorithm keeps one.
        version: the policy's version, stored with every sample.
        prompts: the training split; the stage's prompts are chosen from it, and shard i of n gets every n-th.
    """
    config = ctx.offline
    mine = prompt_batch(prompts, config.prompts, step=0, seed=ctx.seed)[shard :: config.shards]
    clock = Clock()
    about = _about(ctx, shard, clock)
    groups_at_once = max(1, config.micro_batch // config.group_size)
    batches = _generated(ctx, model, policy, version, mine, groups_at_once, clock)
    write_table(path, rollout_schema(model.latent_shape), batches, about)


def generate_shard_from_folders(ctx: StageContext, base: Path, folder: Path, prompts: Path, shard: int, path: Path) -> None:
    """``generate_shard`` with the policy of a folder."""
    model = open_model(ctx.recipe, base)
    policy, metadata = open_policy(ctx, model, folder)
    generate_shard(ctx, model, policy, metadata.version, read_prompts(prompts, "train"), shard, path)


def _generated(
    ctx: StageContext, model: Model, policy: Policy, version: int, prompts: list[Prompt], groups_at_once: int, clock: Clock
) -> Iterator[pa.RecordBatch]:
    schema, config = rollout_schema(model.latent_shape), ctx.config
    with clock.phase("rollout"):
        encode = encode_once(model, prompts)
    progress = tqdm(total=len(prompts) * config.group_size, desc=f"{ctx.label} rollout", unit="image", disable=None)
    for start in range(0, len(prompts), groups_at_once):
        with clock.phase("rollout"), policy.using(ctx.algorithm.generates):
            repeated, keys = ctx.groups(prompts[start : start + groups_at_once], step=0)
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


def _about(ctx: StageContext, shard: int, clock: Clock) -> dict[str, Any]:
    return {
        **shard_identity(ctx),
        "shard": shard,
        "engine": "diffusers",
        "dtype": ctx.config.rollout_precision or ctx.recipe.model.precision,
        "sampler": ctx.config.sampler.model_dump(),
        "micro_batch": ctx.config.micro_batch,
        "seconds": clock.seconds,
    }
