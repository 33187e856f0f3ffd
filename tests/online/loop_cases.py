"""Keys of small online stages, and the batch of one step."""

from __future__ import annotations

import asyncio

from ebbflow.models.encoding import PromptWindows
from ebbflow.online.prompt_sampler import PromptSampler
from ebbflow.online.rollout_queue import RolloutQueue
from ebbflow.online.workers import open_local_workers
from ebbflow.recipe.registry import ALGORITHMS
from ebbflow.rollouts.generate import join_rollouts

NAMES = list(ALGORITHMS)
NEEDS = {
    "distillation": {"teacher": "elsewhere"},
    "gardo": {"auxiliary": ["darkness"], "diversity": "darkness"},
}
NFT = {"algorithm": {"name": "diffusion_nft"}, "sampler": {"name": "ode", "steps": 3}}


def keys_of(name, **rest):
    """The recipe's keys of an algorithm, with those that it cannot do without."""
    return {"name": name, **NEEDS.get(name, {}), **rest}


def collect(ctx, updater, scorer, prompts, step):
    """(the batch of a step, its rollouts)."""

    async def run():
        workers = open_local_workers(ctx, updater, scorer)
        sampler = PromptSampler(ctx, prompts)
        embeddings = await workers.training.encode(prompts)
        windows = PromptWindows([])
        windows.add_late(embeddings)
        queue = RolloutQueue(ctx, workers, sampler, windows, workers.training.encode, step)
        await queue.start_rollouts()
        return await queue.next_batch(step)

    batch = asyncio.run(run())
    return batch, join_rollouts([part.rollouts for part in batch.parts])
