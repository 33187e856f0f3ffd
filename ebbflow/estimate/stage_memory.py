"""The memory of every kind of process of every stage, by its name in the table of an estimate."""

from __future__ import annotations

from collections.abc import Sequence

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
    for ctx in contexts:
        label = ctx.stage_label
        if ctx.config.kind == "offline":
            # A stage on pairs or data generates nothing.
            if ctx.offline_config.takes_prompts:
                memory_by_process[f"{label} rollout"] = memory.rollout_memory(ctx)
            memory_by_process[f"{label} training"] = memory.offline_rank_memory(
                ctx, processes, shards or processes, context_parallel
            )
        elif ctx.online_config.placement == "ray":
            ranks = ctx.online_config.resources.training.count
            memory_by_process[f"{label} training"] = memory.share_tokens(
                context_parallel
            ).online_rank_memory(ctx, ranks // context_parallel, ranks)
            memory_by_process[f"{label} rollout"] = memory.rollout_memory(ctx)
            memory_by_process[f"{label} rewards"] = Memory(others=memory.reward_network_bytes(ctx))
        else:
            num_equal = processes if ctx.online_config.placement == "colocated" else 1
            sharing = context_parallel if num_equal > 1 else 1
            memory_by_process[f"{label} training"] = memory.share_tokens(
                sharing
            ).equal_process_memory(ctx, num_equal // sharing, min(shards or processes, num_equal))
    return memory_by_process
