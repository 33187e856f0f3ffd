"""Stored rollouts of a few bytes, and an updater that learns nothing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import torch

from ebbflow.data.schema import build_rollout_schema, build_score_schema
from ebbflow.offline.shards import (
    SCORES_DIGEST,
    build_layout_metadata,
    build_rollout_batch,
    build_shard_identity,
)
from ebbflow.storage.tables import compute_content_digest, nan_to_null, write_table

ABOUT_SCORES = {"seconds": {"scoring": 2.0}, "weights": {"darkness": 1.0}, "of_sets": []}


def write_scores(ctx, shard, path, keys, rewards):
    """The scores of a shard of a stage, as scoring would write them."""
    rewards = np.array(rewards, np.float64)
    prompt_ids, samples = zip(*keys, strict=True)
    columns = [pa.array(prompt_ids), pa.array(samples), nan_to_null(rewards), nan_to_null(rewards)]
    failure = pa.array(["broken" if np.isnan(reward) else None for reward in rewards], pa.string())
    schema = build_score_schema(["darkness"])
    batch = pa.record_batch([*columns, failure], schema=schema)
    about = {"shard": shard, SCORES_DIGEST: compute_content_digest(pa.Table.from_batches([batch]))}
    write_table(path, schema, [batch], ABOUT_SCORES | build_shard_identity(ctx) | about)
    return path


def write_rollouts(path, keys, shape=(1, 2, 2), precision="float32"):
    """A shard whose latents hold prompt id and sample, so that a row can be recognised."""
    latents = torch.zeros(len(keys), *shape)
    latents[:, 0, 0, :2] = torch.tensor(keys)
    prompt_ids, samples = zip(*keys, strict=True)
    batches = [
        build_rollout_batch(
            prompt_ids[rows], samples[rows], 0, latents[rows], [b""] * len(latents[rows]), precision
        )
        for rows in (slice(start, start + 5) for start in range(0, len(keys), 5))
    ]
    write_table(
        path,
        build_rollout_schema(shape, precision),
        batches,
        {"seconds": {"rollout": 3.0}} | build_layout_metadata(shape, precision),
    )
    return path


class Watched:
    """A updater that keeps a record of what it was given and learns nothing."""

    def __init__(self, hyper):
        self.hyper = hyper
        self.calls = []
        self.alarms = []
        self.sampler_sigmas = torch.tensor([1, 2 / 3, 1 / 3, 0])
        self.policy = SimpleNamespace(context_parallel=1, model=None)

    @property
    def updates(self):
        return len(self.calls)

    def update_policy(self, batch, passes):
        keys = [(int(row[0, 0, 0]), int(row[0, 0, 1])) for row in batch.clean]
        assert keys == list(zip(batch.keys.prompt_ids, batch.keys.samples, strict=True))
        self.calls.append(SimpleNamespace(keys=keys, batch=batch, passes=passes))
        return {"loss": 0.0}
