"""An optimiser step of an offline stage that is replayed shows the samples, scores and advantages
that it trained on.
"""

from __future__ import annotations

import pyarrow as pa
import pytest

from ebbflow.data.prompts import read_prompts, write_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.offline import replay
from ebbflow.offline import training as offline
from ebbflow.offline.advantages import write_advantages
from ebbflow.offline.batches import find_samples_of_step
from ebbflow.offline.replay import replay_offline_step
from ebbflow.offline.rollouts import generate_shard_from_folders
from ebbflow.offline.scoring import score_shard
from ebbflow.offline.training import train_offline_folder
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.tables import read_table
from ebbflow.training.policy_metadata import write_base_policy
from ebbflow.training.replay import ReplayError

pytestmark = pytest.mark.any_cpu

NUM_STEPS = 4
"""Of two shards with two prompts of four samples each, in batches of eight, for two epochs."""


@pytest.fixture
def trained(make_recipe, make_prompts, base_folder, scorer, tmp_path, monkeypatch):
    """(context, base, policy before, prompts, shards, scores, advantages, keys and advantages that
    each step trained on).
    """
    monkeypatch.setattr(replay, "load_scorer", lambda rewards, guardrails: scorer)
    ctx = StageContext(make_recipe(), 0, 1)
    seen = []
    prompts = tmp_path / "prompts.parquet"
    start = tmp_path / "start"
    write_prompts(
        pa.Table.from_pylist([vars(prompt) for prompt in make_prompts(6)], PROMPTS), prompts
    )
    write_base_policy(start, verify_folder(base_folder), ctx.recipe.digest, ctx.recipe.policy)
    shards = [tmp_path / f"stage-{index}.parquet" for index in range(ctx.offline_config.shards)]
    scores = [
        tmp_path / f"stage-scores-{index}.parquet" for index in range(ctx.offline_config.shards)
    ]
    for index, (path, its_scores) in enumerate(zip(shards, scores, strict=True)):
        generate_shard_from_folders(ctx, base_folder, start, prompts, index, path)
        score_shard(ctx, scorer, read_prompts(prompts, "train"), path, its_scores)
    metrics = write_advantages(ctx, scores, tmp_path / "stage-advantages.parquet")
    update = offline._update_policy

    def watched(ctx, updater, part, ranks):
        keys = zip(part.keys.prompt_ids, part.keys.samples, strict=True)
        seen.append(dict(zip(keys, part.advantage.tolist(), strict=True)))
        return update(ctx, updater, part, ranks)

    monkeypatch.setattr(offline, "_update_policy", watched)
    advantages = tmp_path / "stage-advantages.parquet"
    train_offline_folder(
        ctx,
        StageFolders(base_folder, start, prompts, tmp_path / "trained"),
        shards,
        advantages,
        MetricsRecorder(),
    )
    return ctx, (base_folder, start, prompts), shards, scores, metrics, seen


def by_key(paths):
    rows = [row for path in paths for row in read_table(path).to_pylist()]
    return {(row["prompt_id"], row["sample"]): row for row in rows}


def test_every_step_is_replayed_with_the_same_bytes(trained, tmp_path):
    ctx, folders, shards, scores, metrics, seen = trained
    stored = by_key(shards)
    scored = by_key(scores)
    assert len(seen) == NUM_STEPS
    for step in range(NUM_STEPS):
        (tmp_path / f"scratch-{step}").mkdir()
        replayed = replay_offline_step(ctx, *folders, step, 1, tmp_path / f"scratch-{step}")
        keys = [(row["prompt_id"], row["sample"]) for row in replayed.rows]
        assert (
            dict(zip(keys, [row["advantage"] for row in replayed.rows], strict=True)) == seen[step]
        )
        assert replayed.pngs == [stored[key]["image"] for key in keys]
        assert [row["reward"] for row in replayed.rows] == [scored[key]["reward"] for key in keys]
        assert [row["scores"]["darkness"] for row in replayed.rows] == [
            scored[key]["darkness"] for key in keys
        ]
        assert replayed.metrics == metrics


@pytest.mark.parametrize("step", [-1, NUM_STEPS])
def test_a_step_that_the_stage_does_not_have(trained, tmp_path, step):
    ctx, folders, *_ = trained
    with pytest.raises(
        ReplayError, match=f"1.2 offline has no optimiser step {step}, with 1 training processes"
    ):
        replay_offline_step(ctx, *folders, step, 1, tmp_path)


def test_processes_divide_the_samples_as_in_training(trained, tmp_path):
    """Two processes of a stage share each batch: together they train on what one would, if there is
    enough for both.
    """
    ctx, _, shards, *_ = trained
    advantages = tmp_path / "stage-advantages.parquet"
    alone, shared = (
        [find_samples_of_step(ctx, shards, advantages, step, count) for step in range(NUM_STEPS)]
        for count in (1, 2)
    )
    assert [sorted(rows.tolist()) for _, rows, _ in alone] == [
        sorted(rows.tolist()) for _, rows, _ in shared
    ]
    assert find_samples_of_step(ctx, shards, advantages, 0, 1000) is None


def test_pairs_of_a_file_have_no_samples(make_recipe, tmp_path):
    ctx = StageContext(
        make_recipe(offline={"algorithm": {"name": "diffusion_dpo"}, "pairs": "pairs.jsonl"}), 0, 1
    )
    with pytest.raises(ReplayError, match="trains on pairs.jsonl; there are no samples"):
        replay_offline_step(ctx, tmp_path, tmp_path, tmp_path, 0, 1, tmp_path)
