"""The parity gate of another engine, inside a stage: the training policy replays what the stage's
own workers generated.
"""

from __future__ import annotations

from dataclasses import replace

from ebbflow.online.messages import RolloutRequest
from ebbflow.online.rollout_queue import RolloutQueue
from ebbflow.rollouts.parity import plan_parity_samples
from ebbflow.stage import StageContext


async def check_parity(
    ctx: StageContext, queue: RolloutQueue, step: int, first_step: int
) -> dict[str, float]:
    """Measure the engine before the stage's first step, and once more after it: only then weights
    have been pushed that differ.

    Raises:
        ParityError: its log-probs are not those of the training policy.
    """
    # The reference is what others are compared with. A stage that resumes is gated again: its
    # engine is a new one.
    if ctx.online_config.engine == "diffusers" or step > first_step + 1:
        return {}
    request = _build_parity_request(ctx, queue, step)
    rollouts, _, _ = await queue.generate_request(request, lambda: queue.weights)
    return await queue.workers.training.measure_parity(request, rollouts)


def _build_parity_request(ctx: StageContext, queue: RolloutQueue, step: int) -> RolloutRequest:
    """The first samples of a step, recorded as the gate wants them; not profiled, as a profile is
    of the step's own rollouts.
    """
    sampler, plan = plan_parity_samples(ctx.config.sampler)
    # The noise keys are those of the step itself, so the gate looks at samples that count.
    request = queue.build_requests(step, plan)[0]
    some = slice(0, ctx.online_config.parity.samples)
    prompts = request.prompts[some]
    sample_index = request.sample_index[some]
    keys = request.keys.select_slice(some)
    request = replace(request, prompts=prompts, sample_index=sample_index, keys=keys)
    return replace(request, sampler=sampler, task="parity", profiled=False)
