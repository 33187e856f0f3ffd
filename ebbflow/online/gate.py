"""The gate in front of another engine, inside a stage: the training policy replays what the stage's own workers generated."""

from __future__ import annotations

from dataclasses import replace

from ebbflow.online.ahead import Ahead, parts_of
from ebbflow.online.placement import Call, Placement
from ebbflow.online.pool import Job
from ebbflow.online.work import Generated, Part
from ebbflow.rollouts.parity import parity_plan
from ebbflow.stage import StageContext


def check_engine(ctx: StageContext, placement: Placement, ahead: Ahead, step: int, first: int) -> dict[str, float]:
    """Measure the engine before a stage's ``first`` step, and once more after it: only then weights have been pushed that differ.

    Raises:
        ParityError: its log-probs are not those of the training policy.
    """
    if ctx.online.engine == "diffusers" or step > first + 1:
        return {}
    part, calls = _probe(ctx, ahead, step), []

    def generated(call: Call, report: Generated) -> None:
        ahead.busy += report.busy
        calls.append(call)

    ahead.rollout.submit(Job("generate", lambda: (part, ahead.newest), generated))
    ahead.desk.until(lambda: bool(calls))
    return _measured(placement, ahead, part, calls[0])


def _probe(ctx: StageContext, ahead: Ahead, step: int) -> Part:
    """The first samples of a step, as the gate wants them; not traced, for the profile of a step is of its own rollouts."""
    sampler, plan = parity_plan(ctx.config.sampler)
    part, some = parts_of(ctx, ahead.prompts, ahead.embeddings, step, plan)[0], slice(0, ctx.online.parity.samples)
    part = replace(part, prompts=part.prompts[some], sample_index=part.sample_index[some], keys=part.keys.rows(some))
    return replace(part, sampler=sampler, task="parity", traced=False)


def _measured(placement: Placement, ahead: Ahead, part: Part, call: Call) -> dict[str, float]:
    """By all ranks, as a sharded model is only there on all of them."""
    calls = [rank.start("measure", part, call.values[0]) for rank in placement.training]
    ahead.desk.until_ended(calls)
    return [placement.report(call) for call in calls][0]
