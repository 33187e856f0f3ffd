"""An optimiser step of an offline stage again: its samples, scores and advantages.

All samples of the stage are generated with the policy that it started from, so no training is
repeated. All of them are generated, since advantages are over all, and the step's are shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.offline.advantages import write_advantages
from ebbflow.offline.batches import find_samples_of_step
from ebbflow.offline.rollouts import generate_shard_from_folders
from ebbflow.offline.scoring import score_shard
from ebbflow.rewards.combine import load_scorer
from ebbflow.stage import StageContext
from ebbflow.storage.tables import read_table
from ebbflow.training.replay import ReplayedStep, ReplayError


def replay_offline_step(
    ctx: StageContext,
    base: Path,
    folder: Path,
    prompts: Path,
    step: int,
    processes: int,
    scratch: Path,
) -> ReplayedStep:
    """Generate and score the samples of a stage again, and show those of an optimiser step. Nothing
    is tracked.

    Args:
        folder: the policy folder that the stage started from.
        step: from zero.
        processes: that trained together; they decide how the samples are divided into batches.
        scratch: a folder for the samples of the whole stage.

    Raises:
        ReplayError: the stage has no such step, or trains on a file of pairs.
    """
    if not ctx.offline_config.takes_prompts:
        raise ReplayError(
            f"{ctx.stage_label} trains on {ctx.offline_config.source_file}; there are no samples to"
            " generate again"
        )
    shards = [scratch / f"rollouts-{index}.parquet" for index in range(ctx.offline_config.shards)]
    scores = {path: path.with_name(f"scores-{path.name}") for path in shards}
    scorer = load_scorer(ctx.branch_recipe.rewards, ())
    trained_on = read_prompts(prompts, "train")
    for index, path in enumerate(shards):
        generate_shard_from_folders(ctx, base, folder, prompts, index, path)
        score_shard(ctx, scorer, trained_on, path, scores[path])
    advantages = scratch / "advantages.parquet"
    metrics = write_advantages(ctx, list(scores.values()), advantages)
    samples_of_step = None
    if step >= 0:
        samples_of_step = find_samples_of_step(ctx, shards, advantages, step, processes)
    if samples_of_step is None:
        raise ReplayError(
            f"{ctx.stage_label} has no optimiser step {step}, with {processes} training processes"
        )
    path, rows, values = samples_of_step  # one shard: a batch never spans two
    samples = read_table(path).take(rows)
    sample_scores = read_table(scores[path]).take(rows).to_pylist()  # in the order of the shard
    by_id = {prompt.prompt_id: prompt for prompt in trained_on}
    versions = samples["policy_version"].to_pylist()
    described = [
        _build_row(ctx, by_id[score["prompt_id"]], score, version, value)
        for score, version, value in zip(sample_scores, versions, values.tolist(), strict=True)
    ]
    return ReplayedStep(described, samples["image"].to_pylist(), metrics)


def _build_row(
    ctx: StageContext, prompt: Prompt, score: dict[str, Any], version: int, advantage: float
) -> dict[str, Any]:
    """Describe a sample as a dump of an online stage does."""
    metrics = {
        name: value
        for name, value in score.items()
        if name not in ("prompt_id", "sample", "reward", "failure")
    }
    return {
        "prompt_id": prompt.prompt_id,
        "sample": score["sample"],
        "seed": ctx.stage_seed,
        "prompt": prompt.prompt,
        "target": prompt.target,
        "policy_version": version,
        "reward": score["reward"],
        "scores": metrics,
        "failure": score["failure"],
        "advantage": advantage,
        "trained": True,
    }
