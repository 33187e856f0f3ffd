"""The scores of a rollout shard whose reward compares the images of a prompt: whole groups, however
small a micro-batch is.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ebbflow.data.images import encode_pngs
from ebbflow.data.schema import build_rollout_schema
from ebbflow.offline.advantages import write_advantages
from ebbflow.offline.scoring import score_shard
from ebbflow.offline.shards import build_layout_metadata, build_rollout_batch, build_shard_identity
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.combine import Scorer
from ebbflow.stage import StageContext
from ebbflow.storage.tables import read_table, write_table

LATENT = (1, 2, 2)


class Rank(Reward):
    """How many images of the group are darker; keeps the groups that it was asked about."""

    scores = "groups"

    name = "rank"

    def __init__(self):
        self.groups = []

    def __call__(self, images, prompts):
        light = images.mean((1, 2, 3))
        self.groups.append((prompts[0].prompt_id, light.tolist()))
        return RewardResult(light.argsort().argsort().astype(float))


@pytest.mark.parametrize("micro_batch", [1, 6, 64])
def test_groups_are_scored_whole(make_recipe, make_prompts, tmp_path, micro_batch):
    """Micro-batches of 6 would cut groups of 4 in two; the file has a row group for each two
    groups, the last for one.
    """
    ctx = StageContext(make_recipe(offline={"micro_batch": micro_batch, "group_size": 4}), 0, 1)
    levels = np.random.default_rng(1).permutation(20).astype(np.uint8).reshape(5, 4)
    broken = 2
    batches = []
    for ids in ([0, 1], [2, 3], [4]):
        images = levels[ids].reshape(-1, 1, 1, 1).repeat(8, 1).repeat(8, 2).repeat(3, 3)
        latents = torch.zeros(len(images), *LATENT)
        if broken in ids:
            latents[ids.index(broken) * 4] = torch.nan
        samples = [sample for _ in ids for sample in range(4)]
        batches.append(
            build_rollout_batch(
                np.repeat(ids, 4).tolist(), samples, 0, latents, encode_pngs(images), "float32"
            )
        )
    shard = tmp_path / "rollouts.parquet"
    scores = tmp_path / "scores.parquet"
    reward = Rank()
    about = (
        build_shard_identity(ctx)
        | build_layout_metadata(LATENT)
        | {"shard": 0, "seconds": {"rollout": 1.0}}
    )
    write_table(shard, build_rollout_schema(LATENT, "float32"), batches, about)

    score_shard(ctx, Scorer(((reward, 1.0),)), make_prompts(5), shard, scores)

    assert reward.groups == [(prompt, levels[prompt].tolist()) for prompt in range(5)]
    found = read_table(scores)
    expected = levels.argsort(1).argsort(1).astype(float).ravel()
    assert (
        found["rank"].to_numpy()[[8]].tolist() != found["rank"].to_numpy()[[8]].tolist()
    )  # of a latent that is not finite
    finite = np.arange(20) != 8
    assert found["rank"].to_numpy()[finite].tolist() == expected[finite].tolist()


class Level(Reward):
    """Mean of the latents."""

    scores = "latents"

    name = "level"

    def __call__(self, latents, prompts):
        return RewardResult(latents.mean((1, 2, 3)).astype(float))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_reward_of_latents_reads_those_of_the_shard(
    make_recipe, make_prompts, tmp_path, precision
):
    ctx = StageContext(
        make_recipe(
            offline={"micro_batch": 4, "group_size": 4, "latent_precision": precision},
            max_failed_share=0.2,
        ),
        0,
        1,
    )
    latents = torch.arange(8.0)[:, None, None, None] * torch.ones(8, *LATENT)
    latents[5, 0, 0, 0] = torch.nan
    images = encode_pngs(np.zeros((8, 8, 8, 3), np.uint8))
    rows = build_rollout_batch(
        np.repeat([0, 1], 4).tolist(), [0, 1, 2, 3] * 2, 0, latents, images, precision
    )
    shard = tmp_path / "rollouts.parquet"
    scores = tmp_path / "scores.parquet"
    about = (
        build_shard_identity(ctx)
        | build_layout_metadata(LATENT, precision)
        | {"shard": 0, "seconds": {"rollout": 1.0}}
    )
    write_table(shard, build_rollout_schema(LATENT, precision), [rows], about)
    score_shard(ctx, Scorer(((Level(), 1.0),)), make_prompts(2), shard, scores)
    assert read_table(scores)["level"].to_pylist() == [0, 1, 2, 3, 4, None, 6, 7]


class Halved(Reward):
    """A reward with a metric of its own."""

    def __init__(self, name):
        self.name = name

    def __call__(self, images, prompts):
        values = images.mean((1, 2, 3)).astype(float)
        return RewardResult(values, {f"{self.name}_half": values / 2})


def test_a_reward_of_a_prompt_set_has_nulls_elsewhere_and_its_samples_advantages(
    make_recipe, make_prompts, tmp_path
):
    """In one micro-batch for each prompt, so that some have no metric of the one reward and some
    none of the other.
    """
    ctx = StageContext(make_recipe(offline={"micro_batch": 4, "group_size": 4, "shards": 1}), 0, 1)
    prompts = [replace(prompt, source="ab"[prompt.prompt_id]) for prompt in make_prompts(2)]
    images = (
        np.arange(1, 9, dtype=np.uint8).reshape(8, 1, 1, 1).repeat(8, 1).repeat(8, 2).repeat(3, 3)
    )
    rows = build_rollout_batch(
        np.repeat([0, 1], 4).tolist(),
        [0, 1, 2, 3] * 2,
        0,
        torch.zeros(8, *LATENT),
        encode_pngs(images),
        "float32",
    )
    shard = tmp_path / "rollouts.parquet"
    scores = tmp_path / "scores.parquet"
    about = (
        build_shard_identity(ctx)
        | build_layout_metadata(LATENT)
        | {"shard": 0, "seconds": {"rollout": 1.0}}
    )
    write_table(shard, build_rollout_schema(LATENT, "float32"), [rows], about)

    of_sets = {name: configure_reward("ocr", prompts=[name]) for name in "ab"}
    score_shard(
        ctx,
        Scorer(((Halved("a"), 1.0), (Halved("b"), 2.0)), of_sets=of_sets),
        prompts,
        shard,
        scores,
    )

    found = read_table(scores).to_pydict()
    assert found["a"] == [1.0, 2.0, 3.0, 4.0, *[None] * 4]
    assert found["b_half"] == [*[None] * 4, 2.5, 3.0, 3.5, 4.0]
    assert found["reward"] == [1.0, 2.0, 3.0, 4.0, 10.0, 12.0, 14.0, 16.0]
    assert found["failure"] == [None] * 8
    metrics = write_advantages(ctx, [scores], tmp_path / "advantages.parquet")
    assert metrics["reward/scored_share"] == 1
    assert read_table(tmp_path / "advantages.parquet").num_rows == 8
