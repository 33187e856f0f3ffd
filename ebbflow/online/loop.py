"""The hot loop of an online stage: rollout, score, advantages, update, with every model in memory.

One loop for every mode and every placement (``OnlineLoop.run``). The loop is a coroutine: it awaits
workers, which are objects of this process, threads, or Ray actors, and ``RolloutQueue`` keeps
rollouts in flight while it awaits training.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing, closing
from dataclasses import replace

import numpy as np

from ebbflow.algorithms.advantages import AdvantageResult, compute_reward_moments
from ebbflow.data.prompt_windows import build_prompt_windows
from ebbflow.data.prompts import Prompt
from ebbflow.data.records import StageRecord
from ebbflow.models.encoding import Embeddings, PromptWindows
from ebbflow.online.colocated import open_queue
from ebbflow.online.in_flight import list_steps_in_flight, load_in_flight, save_in_flight
from ebbflow.online.messages import RolloutBatch, TrainingReport
from ebbflow.online.monitor import StageMonitor
from ebbflow.online.parity_gate import check_parity
from ebbflow.online.prompt_sampler import PromptSampler
from ebbflow.online.rollout_queue import count_steps_ahead
from ebbflow.online.statistics_alarm import watch_statistics
from ebbflow.online.step_advantages import (
    compute_step_advantages,
    find_varied_prompts_of_step,
    reshape_step_advantages,
)
from ebbflow.online.step_metrics import (
    compute_score_means,
    count_gpus,
    measure_freshness,
    measure_speed,
)
from ebbflow.online.timeline import add_seconds
from ebbflow.online.training_worker import TrainingWorker
from ebbflow.online.workers import StageWorkers
from ebbflow.rewards.combine import ScoreTable, require_scored_share
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training.checkpoint import Checkpoints
from ebbflow.training.stage_loop import StageLoop, StageState, load_stage_state
from ebbflow.training.stop_conditions import handle_sigterm

logger = logging.getLogger(__name__)


def run_online_stage(
    ctx: StageContext,
    workers: StageWorkers,
    prompts: Sequence[Prompt],
    recorder: MetricsRecorder,
    validation: Sequence[Prompt] = (),
) -> StageRecord:
    """Train the policy of the workers, from the first step to the last, without checkpoints
    (``OnlineLoop``).
    """
    return asyncio.run(OnlineLoop(ctx, workers, prompts, recorder, validation=validation).run())


class OnlineLoop:
    """An online stage on its workers.

    Args:
        prompts: the training split.
        recorder: gets the metrics of every step, by its number from zero, and what the stage shows
            of itself.
        state: where the stage starts; updated in place.
        validation: prompts that the policy is validated on, where the stage says how often.
        checkpoints: those of an earlier attempt, from which the stage resumes, and of this one.
    """

    def __init__(
        self,
        ctx: StageContext,
        workers: StageWorkers,
        prompts: Sequence[Prompt],
        recorder: MetricsRecorder,
        state: StageState | None = None,
        validation: Sequence[Prompt] = (),
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.ctx = ctx
        self.config = ctx.online_config
        self.steps_ahead = count_steps_ahead(self.config)
        self.judges = ctx.latent_judges
        self.reshapes_advantages = self.config.hyper_parameters.reshapes_advantages
        # The reference engine is what the gate compares others with.
        self.has_parity_gate = self.config.engine != "diffusers"
        self.workers = workers
        self.validation = validation
        self.recorder = recorder
        self.state = state or StageState()
        self.checkpoints = checkpoints
        self.prompts = prompts

    async def run(self) -> StageRecord:
        """Train for the stage's number of steps.

        Raises:
            Preempted: the machine is taken away; what was learnt so far is in the checkpoints.
        """
        with handle_sigterm():
            await self._open_stage()
            # Closed in the order that an error needs: first the timeline is logged, then what is in
            # flight is given up, before the caller ends the workers.
            async with aclosing(self.queue):
                with closing(self.monitor):
                    # A checkpoint has what an earlier attempt's filter left.
                    if self.config.prompt_filter and self.state.kept_prompts is None:
                        await self._filter_prompts(self.config.prompt_filter.samples)
                    await self._train_steps()
        if self.checkpoints and self.config.validation and self.config.validation.best:
            await self._restore_best(self.checkpoints)
        return StageRecord(
            label=self.ctx.stage_label,
            algorithm=self.config.algorithm_name,
            samples=self.state.samples,
            optimizer_steps=self.state.updates,
            steps=self.state.step,
            seconds=self._sum_seconds(),
            alarms=[*self.state.training_alarms, *self.state.alarms],
        )

    async def _train_steps(self) -> None:
        """The loop. The rollouts that may be in flight are started before training moves the
        weights.
        """
        queue = self.queue
        monitor = self.monitor
        loop = self.loop
        for step in loop.iterate_steps():
            # Between two steps, when neither the rollouts nor the training use the device.
            for window in self.embeddings.list_missing(range(step, step + self.steps_ahead + 1)):
                self.embeddings.add(window, await self._encode_prompts(window.list_prompts()))
            start = time.time()
            queue.weights = await self.workers.publish_weights(step)
            pushed = {"push/bytes": queue.weights.size, "push/seconds": time.time() - start}
            # The gate comes after the push, because it measures the engine with the weights that it
            # is about to generate with.
            if self.has_parity_gate:
                pushed |= await check_parity(self.ctx, queue, step, loop.first_step)
            # The time of validation and checkpoints is not the step's: its start moves by it.
            if self.config.validation:
                start += await monitor.validate_policy(step)
            # After the validation, whose score goes into the checkpoint: the best one is chosen by
            # it.
            if self.checkpoints:
                start += await self._save_due_checkpoint(self.checkpoints, step)

            await queue.start_rollouts()
            batch = await queue.next_batch(step)
            await self._refill_groups(batch)
            if self.config.curriculum:
                self.sampler.update_curriculum(
                    *compute_reward_moments(batch.scores.reward, batch.prompt_ids)
                )
            advantages = compute_step_advantages(
                self.ctx, batch, self.workers.reward_weights, self.state.history, self.judges
            )
            if self.reshapes_advantages:
                memory = self.state.algorithm_memory
                advantages = reshape_step_advantages(self.ctx, batch, advantages, memory)
            report = await self._train_on_batch(batch, advantages)
            # Last, because it reads the clock: what stands above is the step's own time.
            metrics = await self._measure_step(batch, advantages, report, step, start)
            # A batch may hold the graphs of its rollouts, whose memory the next step needs.
            del batch
            # ``finish_step`` counts the step, so a checkpoint of a preempted stage below begins
            # with the next.
            loop.finish_step(
                metrics | pushed, reward=f"{metrics.get('reward/mean', float('nan')):.3f}"
            )
            if loop.preempted:
                await self._save_checkpoint()
                raise loop.preemption_error()
        # The last weights were never published: no step generates with them.
        if monitor.is_validation_due(self.state.step, last=True):
            queue.weights = await self.workers.publish_weights(self.state.step)
            await monitor.validate_policy(self.state.step, last=True)

    async def _open_stage(self) -> None:
        """Resume where there is a checkpoint, encode the prompts of the first steps, and put the
        checkpoint's rollouts in flight again.
        """
        ctx = self.ctx
        newest = self.checkpoints.find_newest() if self.checkpoints else None
        if newest:
            folder, saved = newest
            await self.workers.load_checkpoint(folder)
            # In place: the caller holds the same state.
            load_stage_state(folder, saved, self.state, self.recorder, self.config.steps)
            logger.info("resuming after step %d of %d", self.state.step, self.config.steps)
        # What the timeline does not know: earlier attempts, and all encoding.
        self.seconds_before = self.state.seconds
        # Only now: the sampler divides the prompts that the checkpoint has kept.
        self.sampler = PromptSampler(ctx, self.prompts, self.state)
        self.embeddings = PromptWindows(self.sampler.list_windows(), self.config.negative_gradient)
        step = self.state.step
        # A checkpoint's rollouts in flight may be of steps in front of its own.
        first = min([step, *(list_steps_in_flight(newest[0]) if newest else [])])
        for window in self.embeddings.list_missing(range(first, step + self.steps_ahead + 1)):
            self.embeddings.add(window, await self._encode_prompts(window.list_prompts()))
        encode = self._encode_prompts
        self.queue = open_queue(ctx, self.workers, self.sampler, self.embeddings, encode, step)
        self.monitor = StageMonitor(ctx, self.queue, self.recorder, self.validation)
        # After the queue exists: the checkpoint's rollouts go into it, already generated.
        if newest:
            await load_in_flight(newest[0], self.queue)
        # Only now: the loop begins at the step that the checkpoint has put into the state.
        self.loop = StageLoop(
            ctx,
            self.state,
            self.recorder,
            self.checkpoints,
            self.config.steps,
            count_gpus(ctx),
            self.steps_ahead,
            quiet=not self.queue.writes_files,
        )

    async def _encode_prompts(self, prompts: Sequence[Prompt]) -> Embeddings:
        start = time.perf_counter()
        embeddings = await self.workers.training.encode(prompts)
        encoding = {"encoding": time.perf_counter() - start}
        self.seconds_before = add_seconds(self.seconds_before, encoding)
        return embeddings

    async def _filter_prompts(self, samples: int) -> None:
        """The first pass of ``prompt_filter``, with ``samples`` samples of each prompt.

        Raises:
            ParityError: the engine that would make it does not pass the gate.
            RewardError: too many of its samples have no reward.
            StageError: it leaves too few prompts.
        """
        # No step has published weights yet, and another engine generates nothing without them.
        self.queue.weights = await self.workers.publish_weights(0)
        if self.has_parity_gate:
            await check_parity(self.ctx, self.queue, 0, 0)
        # Made as those of step 0.
        prompt_ids: list[int] = []
        tables: list[ScoreTable] = []
        at_once = self.queue.max_requests_at_once
        for window in build_prompt_windows([[prompt] for prompt in self.sampler.prompts]):
            requests = await self.queue.build_requests(
                0, prompts=window.list_prompts(), filter_samples=samples
            )
            # One id for each sample, [N], in the order of the requests and so of the scores.
            prompt_ids += [prompt.prompt_id for request in requests for prompt in request.prompts]
            for start in range(0, len(requests), at_once):
                parts = await self.queue.generate_and_score_all(
                    requests[start : start + at_once], self.queue.weights
                )
                tables += [part.scores for part in parts]
                # Their images are not needed, and would be in memory with those of the next part.
                del parts
        scores = ScoreTable.concatenate(tables)
        require_scored_share(scores, self.ctx.recipe.max_failed_share)
        moments = compute_reward_moments(scores.reward, np.array(prompt_ids))
        self.sampler.filter_prompts(*moments)
        # Of what is left: the prompts of the steps were not known before.
        self.embeddings.windows = self.sampler.list_windows()
        num_remaining = len(self.sampler.remaining_prompts)
        logger.info(
            "%s: prompt_filter keeps %d of %d prompts",
            self.ctx.stage_label,
            num_remaining,
            len(self.sampler.prompts),
        )
        self.recorder.log_metrics({"prompts/kept": num_remaining}, 0)

    async def _refill_groups(self, batch: RolloutBatch) -> None:
        """Add the rollouts of other prompts to a step for groups that say nothing, once enough of
        its own are scored.
        """
        # Asked first: where a reward is down no group varies, and refills would generate for
        # nothing.
        require_scored_share(batch.scores, self.ctx.recipe.max_failed_share)
        for _ in range(self.config.refill_rounds):
            varied = find_varied_prompts_of_step(self.ctx, batch, self.workers.reward_weights)
            further = self.sampler.sample_replacements(batch.step, batch.distinct_prompts, varied)
            # No prompts are left, or every group varies.
            if not further:
                break
            await self.queue.add_prompts(batch, further)
            require_scored_share(batch.scores, self.ctx.recipe.max_failed_share)

    async def _train_on_batch(
        self, batch: RolloutBatch, advantages: AdvantageResult
    ) -> TrainingReport:
        """The updates of a step, on all ranks, while other rollouts and rewards continue; rank 0's
        report, with all spans.
        """
        # Put once: every rank gets the same handles, and Ray stores what they name only once.
        requests = self.workers.put_value(batch.requests)
        shared_advantages = self.workers.put_value(advantages)
        # Handles: the samples go from rollout workers to the ranks without passing through this
        # process.
        rollouts = [part.rollouts for part in batch.parts]
        reports = await self.workers.training.call(
            TrainingWorker.train, requests, shared_advantages, *rollouts
        )
        # Ranks agree on metrics, updates and alarms, because these are averaged or counted over the
        # group; spans are each rank's own.
        self.state.samples += len(advantages.values)
        self.state.updates = reports[0].updates
        self.state.training_alarms = reports[0].alarms
        return replace(reports[0], spans=[span for report in reports for span in report.spans])

    async def _measure_step(
        self,
        batch: RolloutBatch,
        advantages: AdvantageResult,
        report: TrainingReport,
        step: int,
        start: float,
    ) -> dict[str, float]:
        """Metrics of a step that began at ``start``: of its training, scores, speed and
        utilisation; also what the monitor shows of it.
        """
        end = time.time()
        metrics = advantages.metrics | report.metrics | {"updates": report.updates}
        metrics |= measure_freshness(batch, step)
        replaced = self.workers.rollout.num_replaced + self.workers.reward.num_replaced
        metrics |= compute_score_means(batch.scores) | {"workers/replaced": replaced}
        if self.config.refill_rounds:
            # Prompts beyond those of a step came in refill rounds.
            metrics["group/refilled"] = len(batch.distinct_prompts) - self.config.prompts_per_step
        if self.config.curriculum:
            metrics["prompts/encoded_late"] = self.queue.num_encoded_late
            self.queue.num_encoded_late = 0
        if batch.size:
            metrics |= dict(zip(("size/height", "size/width"), batch.size, strict=True))
        metrics |= watch_statistics(self.ctx, self.state, batch)
        metrics |= measure_speed([*batch.spans, *report.spans], len(advantages.values), end - start)
        # The monitor drains the queue's spans into the timeline; those of rollouts and rewards are
        # there already.
        self.queue.spans += report.spans
        metrics |= await self.monitor.record_step(batch, advantages.values, step, start, end)
        # Kept in the state, so that the next checkpoint has it.
        self.state.seconds = self._sum_seconds()
        return metrics

    async def _save_due_checkpoint(self, checkpoints: Checkpoints, step: int) -> float:
        """Save a checkpoint where one is due, but not one that was just loaded, unless it has a new
        score; seconds it took.
        """
        new = step > self.loop.first_step or self.monitor.score is not None
        # No weight has moved before step 0, so a checkpoint there would only repeat the start.
        if step == 0 or not new or not checkpoints.is_due(step):
            return 0.0
        start = time.time()
        await self._save_checkpoint(self.monitor.score)
        return time.time() - start

    async def _save_checkpoint(self, score: float | None = None) -> None:
        """Save where the stage stands. ``score``: of a validation of the policy as it is."""
        if not self.checkpoints:
            return
        # Committed when the block ends: a stage that dies in it resumes from the checkpoint before.
        with self.checkpoints.save_step(
            self.state.step, self.loop.build_checkpoint_state(), score
        ) as folder:
            await save_in_flight(folder, self.queue)
            await self.workers.save_checkpoint(folder)

    async def _restore_best(self, checkpoints: Checkpoints) -> None:
        """End with the policy that was validated best, and its statistics of prompts, unless the
        last one is as good.
        """
        best = checkpoints.find_best()
        last = self.monitor.score
        best_step = self.state.step
        if best and (last is None or best.score > last):
            await self.workers.load_checkpoint(best.folder)
            # Only the statistics of prompts go back with the policy: steps, samples and seconds
            # count what the stage has really done.
            saved = StageState()
            saved.load_state_dict(checkpoints.read_state(best.folder)["state"])
            self.state.history = saved.history
            best_step = best.step
        self.recorder.log_metrics({"validation/best_step": best_step}, self.state.step)

    def _sum_seconds(self) -> dict[str, float]:
        return add_seconds(self.seconds_before, self.monitor.timeline.seconds)
