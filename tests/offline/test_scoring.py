"""The scores of a rollout shard whose reward compares the images of a prompt: whole groups, however small a micro-batch is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ebbflow.data.images import encode_png
from ebbflow.data.schema import rollout_schema
from ebbflow.offline.scoring import score_shard
from ebbflow.offline.shards import layout_metadata, rollout_batch, shard_identity
from ebbflow.rewards.base import RewardResult
from ebbflow.rewards.combine import Scorer
from ebbflow.stage import StageContext
from ebbflow.storage.tables import read_table, write_table

LATENT = (1, 2, 2)


class Rank:
    """How many images of the group are darker; keeps the groups that it was asked about."""

    name = "rank"

    def __init__(self):
        self.groups = []

    def unavailable(self):
        return None

    def compare(self, images, prompt):
        light = images.mean((1, 2, 3))
        self.groups.append((prompt.prompt_id, light.tolist()))
        return RewardResult(light.argsort().argsort().astype(float))


@pytest.mark.parametrize("micro_batch", [1, 6, 64])
def test_groups_are_scored_whole(make_recipe, make_prompts, tmp_path, micro_batch):
    """Micro-batches of 6 would cut groups of 4 in two; the file has a row group for each two groups, the last for one."""
    ctx = StageContext(make_recipe(offline={"micro_batch": micro_batch, "group_size": 4}), 0, 1)
    levels, broken = np.random.default_rng(1).permutation(20).astype(np.uint8).reshape(5, 4), 2
    batches = []
    for ids in ([0, 1], [2, 3], [4]):
        images = levels[ids].reshape(-1, 1, 1, 1).repeat(8, 1).repeat(8, 2).repeat(3, 3)
        latents = torch.zeros(len(images), *LATENT)
        if broken in ids:
            latents[ids.index(broken) * 4] = torch.nan
        samples = [sample for _ in ids for sample in range(4)]
        batches.append(rollout_batch(np.repeat(ids, 4).tolist(), samples, 0, latents, encode_png(images), "float32"))
    shard, scores, reward = tmp_path / "rollouts.parquet", tmp_path / "scores.parquet", Rank()
    about = shard_identity(ctx) | layout_metadata(LATENT) | {"shard": 0, "seconds": {"rollout": 1.0}}
    write_table(shard, rollout_schema(LATENT, "float32"), batches, about)

    score_shard(ctx, Scorer(((reward, 1.0),)), make_prompts(5), shard, scores)

    assert reward.groups == [(prompt, levels[prompt].tolist()) for prompt in range(5)]
    found = read_table(scores)
    expected = levels.argsort(1).argsort(1).astype(float).ravel()
    assert found["rank"].to_numpy()[[8]].tolist() != found["rank"].to_numpy()[[8]].tolist()  # of a latent that is not finite
    finite = np.arange(20) != 8
    assert found["rank"].to_numpy()[finite].tolist() == expected[finite].tolist()
