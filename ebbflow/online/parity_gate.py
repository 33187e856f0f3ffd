"""The parity gate of another engine, inside a stage: the training policy replays what the stage's
own workers generated.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ebbflow.flow.noise import SampleKeys
from ebbflow.online.messages import RolloutRequest
from ebbflow.online.rollout_queue import RolloutQueue
from ebbflow.rollouts.parity import plan_parity_samples
from ebbflow.stage import StageContext

CHECKED_TRANSFERS = 3
"""Transfers of weights, after the first ones, that are each followed by a look of the gate: an
engine that ignores adapters shows it once they have changed anything.
"""


async def check_parity(
    ctx: StageContext, queue: RolloutQueue, step: int, first_step: int
) -> dict[str, float]:
    """Measure an engine other than the reference before the stage's first steps, and then every
    ``parity.every`` steps.

    Raises:
        ParityError: it does not generate what the training policy would.
    """
    # A stage that resumes counts from there, because its engine is a new one.
    transfers = step - first_step
    if transfers > CHECKED_TRANSFERS and transfers % ctx.online_config.parity.every:
        return {}
    request = await _build_parity_request(ctx, queue, step)
    rollouts, _, _ = await queue.generate_request(request, queue.weights)
    return await queue.workers.training.measure_parity(request, rollouts)


async def _build_parity_request(
    ctx: StageContext, queue: RolloutQueue, step: int
) -> RolloutRequest:
    """Some samples of a step, of as many prompts as possible, recorded as the gate wants them; not
    profiled, as a profile is of the step's own rollouts.
    """
    sampler, plan = plan_parity_samples(ctx.config.sampler)
    # The noise keys are those of the step itself, so the gate looks at samples that count.
    requests = await queue.build_requests(step, plan)
    keys = SampleKeys.join_keys([request.keys for request in requests])
    prompts = [prompt for request in requests for prompt in request.prompts]
    # The first sample of every prompt before the second of any: what the network computes of a
    # prompt rounds alike in all of its samples, so that those of one prompt say less.
    some = np.argsort(keys.samples, kind="stable")[: ctx.online_config.parity.samples]
    chosen = [prompts[position] for position in some]
    distinct = {prompt.prompt_id: prompt for prompt in chosen}
    rows = {prompt_id: row for row, prompt_id in enumerate(distinct)}
    return replace(
        requests[0],
        prompts=chosen,
        conditioning=queue.embeddings(step, list(distinct.values())),
        sample_index=np.array([rows[prompt.prompt_id] for prompt in chosen]),
        keys=keys.select_samples(some),
        sampler=sampler,
        task="parity",
        profiled=False,
    )
