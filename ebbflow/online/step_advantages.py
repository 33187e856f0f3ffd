"""The advantages of a step's samples, as its stage asks for them: of whole samples, of the steps of
a tree, or of each latent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ebbflow.algorithms.advantages import (
    AdvantageResult,
    PromptStatistics,
    compute_advantages,
    compute_latent_advantages,
    compute_tree_advantages,
    find_varied_prompts,
    summarise_advantages,
)
from ebbflow.algorithms.base import StepScores
from ebbflow.online.messages import RolloutBatch
from ebbflow.rewards.base import RewardError
from ebbflow.stage import StageContext
from ebbflow.training.passes import TrainingError


def compute_step_advantages(
    ctx: StageContext,
    batch: RolloutBatch,
    weights: Mapping[str, float],
    history: PromptStatistics,
    judges: Mapping[str, Collection[str]],
) -> AdvantageResult:
    """Compute the advantages of the N samples of a step.

    Args:
        weights: of the trained rewards in their sum, by column.
        history: the moments of every prompt so far, of ``advantages.running``.
        judges: the rewards that judge each latent (``StageContext.latent_judges``).
    """
    config = ctx.online_config.advantages
    table = batch.scores
    # Of the trained rewards, [N] each, without other columns.
    scores = {name: table.metrics[name] for name in weights}
    scored = table.scored_rows
    # Leaves of a tree share steps, so each of their W steps gets an advantage of its own, [N, W].
    if ctx.online_config.tree:
        return compute_tree_advantages(
            scores, weights, batch.prompt_ids, config, batch.tree_nodes, scored
        )
    if judges:
        return compute_latent_advantages(scores, weights, batch.prompt_ids, config, judges, scored)
    return compute_advantages(scores, weights, batch.prompt_ids, config, history, scored)


def reshape_step_advantages(
    ctx: StageContext, batch: RolloutBatch, advantages: AdvantageResult, memory: dict[str, Any]
) -> AdvantageResult:
    """Return the advantages of a step as an algorithm with ``reshapes_advantages`` reshapes them.

    Args:
        memory: what the algorithm remembers from step to step.

    Raises:
        RewardError: it reads a score that no reward gives.
        TrainingError: it gates a penalty that its samples have not.
    """
    table = batch.scores
    # Every column, also those of rewards without weight, which advantages leave out.
    scores = StepScores(table.reward, table.metrics, batch.prompt_ids)
    # Metrics of rewards are known only now that they have scored.
    for name in ctx.config.hyper_parameters.read_columns:
        if name not in scores.columns:
            raise RewardError(
                f"{ctx.config.algorithm_name} reads the scores {name!r}, and the rewards give"
                f" {', '.join(scores.columns)}; add it to 'rewards' with weight: 0, or name"
                " another one"
            )
    reshape = ctx.algorithm.reshape
    assert reshape is not None, "the recipe compares it with reshapes_advantages"
    reshaped = reshape(advantages, scores, ctx.config.hyper_parameters, memory)
    if reshaped.penalty_factor is not None and not ctx.config.algorithm_kind.records_trajectory:
        raise TrainingError(
            f"'reshape' of {ctx.config.algorithm_name} returned a penalty_factor, which only rows"
            " of trajectories have; leave it None, or derive its hyper-parameters from"
            " TrajectoryConfig"
        )
    # Losses rely on the clip, whatever the algorithm multiplied the advantages with.
    clip = ctx.config.advantages.clip
    values = reshaped.values if clip is None else reshaped.values.clip(-clip, clip)
    metrics = reshaped.metrics | summarise_advantages(values[reshaped.keep])
    return replace(reshaped, values=values, metrics=metrics)


def find_varied_prompts_of_step(
    ctx: StageContext, batch: RolloutBatch, weights: Mapping[str, float]
) -> list[int]:
    """Find the prompts of a step whose samples score differently, ascending.

    Args:
        weights: as of ``compute_step_advantages``.
    """
    table = batch.scores
    return find_varied_prompts(
        {name: table.metrics[name] for name in weights},
        weights,
        batch.prompt_ids,
        ctx.online_config.advantages,
        table.scored_rows,
    )
