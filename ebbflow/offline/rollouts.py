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
from ebbflow.offline.shards import made_for
from ebbflow.rollouts.generate import generate
from ebbflow.stage import Place
from ebbflow.storage.tables import write_table
from ebbflow.timing import Clock
from ebbflow.training.handover import open_model, open_policy
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
