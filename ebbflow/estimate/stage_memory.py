"""The memory of every kind of process of every stage, by its name in the table of an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ebbflow.estimate.main_memory import (
    add_encoding,
    count_part_bytes,
    count_step_bytes,
    encodes_between_steps,
)
from ebbflow.estimate.memory import Memory, ProcessMemory
from ebbflow.stage import StageContext


def estimate_stage_memory(
    memory: ProcessMemory,
    contexts: Sequence[StageContext],
    processes: int,
    shards: int | None = None,
    context_parallel: int = 1,
) -> dict[str, Memory]:
    """Return the memory of every kind of process of every stage, by its name in the table.

    Args:
        processes: number of processes that train an offline stage or run a colocated one.
        shards: number of these processes that share one copy of the model; None for all.
        context_parallel: number of these processes, and of the training group of a stage on Ray,
            that share the tokens of a sample.
    """
    memory_by_process: dict[str, Memory] = {}
    parts = count_part_bytes(memory)
    shards = shards or processes
    for ctx in contexts:
        label = ctx.stage_label
        between_steps = encodes_between_steps(ctx)
        if ctx.config.kind == "offline":
            # A stage on pairs or data generates nothing.
            if ctx.offline_config.takes_prompts:
                rollout = replace(memory.rollout_memory(ctx), waiting=parts)
                memory_by_process[f"{label} rollout"] = add_encoding(memory, rollout, 1)
            training = memory.offline_rank_memory(ctx, processes, shards, context_parallel)
            training = replace(training, waiting=parts)
            memory_by_process[f"{label} training"] = add_encoding(
                memory, training, shards, between_steps
            )
        elif ctx.online_config.placement == "ray":
            memory_by_process |= _estimate_ray_stage(memory, ctx, context_parallel)
        else:
            num_equal = processes if ctx.online_config.placement == "colocated" else 1
            sharing = context_parallel if num_equal > 1 else 1
            sharing_samples = num_equal // sharing
            num_shards = min(shards, num_equal)
            training = memory.share_tokens(sharing).equal_process_memory(
                ctx, sharing_samples, num_shards
            )
            step = count_step_bytes(memory, ctx, sharing_samples, 1 / sharing_samples)
            training = replace(training, waiting=parts + step)
            memory_by_process[f"{label} training"] = add_encoding(
                memory, training, num_shards, between_steps
            )
    return memory_by_process


def _estimate_ray_stage(
    memory: ProcessMemory, ctx: StageContext, context_parallel: int
) -> dict[str, Memory]:
    """Return the memory of the training, rollout and reward workers of a stage on Ray."""
    label = ctx.stage_label
    parts = count_part_bytes(memory)
    ranks = ctx.online_config.resources.training.count
    # The trained weights are there once more, to be sent or as they were received.
    weights = 4 * memory.trained
    training = memory.share_tokens(context_parallel).online_rank_memory(
        ctx, ranks // context_parallel, ranks
    )
    training = replace(training, waiting=parts + weights + count_step_bytes(memory, ctx, 1))
    return {
        f"{label} training": add_encoding(memory, training, ranks, encodes_between_steps(ctx)),
        # Its requests come with their encoded prompts.
        f"{label} rollout": replace(memory.rollout_memory(ctx), waiting=parts + weights),
        f"{label} rewards": Memory(others=memory.reward_network_bytes(ctx)),
    }
