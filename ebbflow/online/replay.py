"""A training step of an online stage again: its samples, scores and advantages.

A sample is a function of the weights at its step and of (seed, prompt, sample, denoising step). So
the stage trains again, from its start or from a checkpoint before the step, as far as the step's
rollouts. On CPUs that gives the same bytes, in one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Never

from ebbflow.algorithms.advantages import AdvantageResult
from ebbflow.data.images import encode_pngs
from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.online.loop import OnlineLoop
from ebbflow.online.messages import RolloutBatch, TrainingReport
from ebbflow.online.monitor import build_sample_rows
from ebbflow.online.step_metrics import compute_score_means
from ebbflow.online.train_folder import open_workers
from ebbflow.online.workers import StageWorkers
from ebbflow.recipe.online import ResourcesConfig
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.training.checkpoint import Checkpoints
from ebbflow.training.policy_io import read_prompt_statistics
from ebbflow.training.policy_metadata import read_policy_metadata
from ebbflow.training.replay import ReplayedStep, ReplayError
from ebbflow.training.stage_loop import StageState


def replay_online_step(
    ctx: StageContext,
    folders: StageFolders,
    step: int,
    checkpoints: Checkpoints | None = None,
) -> ReplayedStep:
    """Generate, score and compare the samples of a step again. Nothing is tracked, and no
    checkpoint is written.

    Args:
        folders: of the stage; nothing is written to its output.
        step: from zero.
        checkpoints: of the stage, none of them of a later step than this one.

    Raises:
        ReplayError: the stage has no such step, or does not repeat.
    """
    if not 0 <= step < ctx.online_config.steps:
        raise ReplayError(
            f"{ctx.stage_label} has the steps 0 to {ctx.online_config.steps - 1}, not {step}"
        )
    if ctx.online_config.placement == "ray" and ctx.online_config.mode == "async":
        raise ReplayError(
            f"{ctx.stage_label} ran in mode 'async' with placement 'ray': which weights generated a"
            " sample depended on when a worker was free, so it does not repeat; see the dumps that"
            " it logged"
        )
    # The placement changes no sample, and one process needs no cluster.
    ctx = _limit_to_one_process(ctx)
    metadata = read_policy_metadata(folders.policy)
    state = StageState(read_prompt_statistics(ctx, metadata, folders.policy))
    prompts = read_prompts(folders.prompts, "train")
    with closing(open_workers(ctx, folders)) as workers:
        loop = _ReplayLoop(ctx, workers, prompts, step, state, checkpoints)
        try:
            asyncio.run(loop.run())
        except _ReachedError as reached:
            return reached.replayed
    raise ReplayError(f"{ctx.stage_label} ended before its step {step}")


def _limit_to_one_process(ctx: StageContext) -> StageContext:
    """The stage in one process, without what does not change its training and without limits on its
    time.
    """
    changes = {
        "placement": "in_process",
        "resources": ResourcesConfig(),
        "max_hours": None,
        "max_gpu_hours": None,
    }
    without_monitoring = dict.fromkeys(("validation", "dumps", "profile"))
    alone = ctx.online_config.model_copy(update=changes | without_monitoring)
    stages = [
        alone if index == ctx.stage else stage for index, stage in enumerate(ctx.recipe.stages)
    ]
    return replace(ctx, recipe=ctx.recipe.model_copy(update={"stages": stages}))


class _ReachedError(Exception):
    """Ends the loop at the step that is replayed."""

    def __init__(self, replayed: ReplayedStep) -> None:
        super().__init__("the step is reached")
        self.replayed = replayed


class _ReplayLoop(OnlineLoop):
    """The loop of the stage, as far as the samples of one step."""

    def __init__(
        self,
        ctx: StageContext,
        workers: StageWorkers,
        prompts: Sequence[Prompt],
        wanted: int,
        state: StageState,
        checkpoints: Checkpoints | None,
    ) -> None:
        super().__init__(ctx, workers, prompts, MetricsRecorder(), state, checkpoints=checkpoints)
        self.wanted = wanted

    async def _train_on_batch(
        self, batch: RolloutBatch, advantages: AdvantageResult
    ) -> TrainingReport:
        if batch.step == self.wanted:
            await self._raise_replayed_step(batch, advantages)
        return await super()._train_on_batch(batch, advantages)

    async def _save_due_checkpoint(self, checkpoints: Checkpoints, step: int) -> float:
        # The checkpoints are those of the stage that is replayed: they are only read.
        return 0.0

    async def _raise_replayed_step(self, batch: RolloutBatch, advantages: AdvantageResult) -> Never:
        learnt = zip(advantages.values.tolist(), advantages.keep.tolist(), strict=True)
        rows = [
            row | {"advantage": value, "trained": trained}
            for row, (value, trained) in zip(build_sample_rows(batch.parts), learnt, strict=True)
        ]
        pngs = [
            png
            for part in batch.parts
            for image in await self.workers.fetch_value(part.images)
            for png in encode_pngs(image[None])
        ]
        # An exception ends the loop from within a step: the loop needs no branch for replays.
        raise _ReachedError(
            ReplayedStep(rows, pngs, advantages.metrics | compute_score_means(batch.scores))
        )
