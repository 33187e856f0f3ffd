"""An online stage as a group of equal processes (``placement: colocated``): each rank generates,
scores and trains on its own share of a step, with the weights that it trains.

Every rank runs the whole loop (``OnlineLoop``), and all of them take the same decisions, from the
same numbers: the requests of a step are dealt out, and what every rank needs to know of the others'
(scores, image statistics) is gathered once they are scored. Samples stay on the rank that generated
them, but for the few that another rank trains on (``SampleExchange``). A request is the same as in
one process, so its samples are, too, to the last bit.

Ranks that share the tokens of a sample (``context_parallel``) have the same requests, samples and
rows to train on, and the first of them scores. Another split of the attention rounds in another
way, so their samples are those of one process up to rounding.

Ranks meet in collectives, which they must enter in the same order: the loop's own coroutine enters
them, and no task that runs beside it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ebbflow.algorithms.advantages import AdvantageResult
from ebbflow.data.prompts import Prompt
from ebbflow.models.encoding import Embeddings, PromptWindows
from ebbflow.online.messages import (
    Handle,
    RolloutBatch,
    RolloutPart,
    RolloutReport,
    RolloutRequest,
    TrainingReport,
)
from ebbflow.online.prompt_sampler import PromptSampler
from ebbflow.online.rollout_queue import RolloutQueue
from ebbflow.online.sample_exchange import RankValue, RolloutsHeader, SampleExchange
from ebbflow.online.training_worker import TrainingWorker
from ebbflow.online.workers import LocalWorkers, StageError, StageWorkers
from ebbflow.rewards.combine import Scorer, ScoreTable
from ebbflow.rollouts.generate import Rollouts
from ebbflow.rollouts.weights import WeightsVersion
from ebbflow.stage import StageContext
from ebbflow.training.checkpoint import collect_parts
from ebbflow.training.distributed import Ranks
from ebbflow.training.object_messages import (
    SentObject,
    broadcast_object,
    gather_objects,
    receive_object,
    send_object,
)
from ebbflow.training.shared_prompts import encode_prompts_together

SPANS_TAG = 1000
"""Marks the messages with spans; ``SampleExchange`` numbers its own from 0 on."""
MAX_SCORING_MINUTES = 20
"""Longest wait of a rank for the next of its own requests to be scored. The other ranks wait for it
in a collective, which ends them after ``TIMEOUT_MINUTES`` without a word of what was slow.
"""


class ColocatedTrainingWorker(TrainingWorker):
    """A rank that trains on samples which lie on the ranks that generated them."""

    # Those of the last step, until rank 0 has them.
    _sent_spans: SentObject | None = None

    def encode(self, prompts: Iterable[Prompt]) -> Embeddings:
        return encode_prompts_together(self.updater.policy.model, prompts, self.encodes_negatives)

    def train(
        self, requests: Sequence[RolloutRequest], advantages: AdvantageResult, *rollouts: Any
    ) -> TrainingReport:
        """As in one process; rank 0's report has the spans of all ranks, which it writes."""
        report = super().train(requests, advantages, *rollouts)
        # Sent instead of gathered: no rank but the first needs them, and none waits for another.
        if self.rank:
            if self._sent_spans:
                self._sent_spans.wait_until_received()
            self._sent_spans = send_object(report.spans, 0, SPANS_TAG)
            return report
        others = [receive_object(rank, SPANS_TAG) for rank in range(1, Ranks.current().world)]
        spans = [span for part in (report.spans, *others) for span in part]
        return replace(report, spans=spans)

    def join_step(self, rollouts: Sequence[RankValue]) -> tuple[Rollouts, SampleExchange | None]:
        exchange = SampleExchange(rollouts, self.updater.policy.context_parallel)
        return exchange.rollouts, exchange


class ColocatedWorkers(LocalWorkers):
    """``StageWorkers`` of one rank of the group. Handles of rollouts and images are ``RankValue``,
    once the step is gathered.
    """

    def __init__(self, trainer: TrainingWorker, scorer: Scorer) -> None:
        super().__init__(trainer, scorer, index=trainer.rank)
        self.ranks = Ranks.current()
        self.context_parallel = trainer.updater.policy.context_parallel

    async def fetch_value(self, handle: Handle) -> Any:
        """As the protocol, on every rank; all of them ask."""
        if not isinstance(handle, RankValue):
            return handle
        return broadcast_object(handle.value, handle.owner * self.context_parallel)

    async def save_checkpoint(self, folder: Path) -> None:
        """Write this rank's part, and bring those of other machines to that of rank 0."""
        await super().save_checkpoint(folder)
        collect_parts(folder, self.trainer.updater)

    def keep_gathered(self) -> AbstractContextManager[None]:
        """Keep sharded weights gathered for all rollouts of the block, where the recipe says so."""
        return self.trainer.updater.policy.keep_gathered()


class ColocatedQueue(RolloutQueue):
    """The rollouts in flight of one rank: of each step its own requests, and a place for those of
    the others until the step is gathered.
    """

    workers: ColocatedWorkers

    def __init__(
        self,
        ctx: StageContext,
        workers: ColocatedWorkers,
        sampler: PromptSampler,
        embeddings: PromptWindows,
        encode: Callable[[Sequence[Prompt]], Awaitable[Embeddings]],
        first_step: int = 0,
    ) -> None:
        super().__init__(ctx, workers, sampler, embeddings, encode, first_step)
        self.ranks = workers.ranks
        self.row_ranks = self.ranks.row_ranks(workers.context_parallel)
        self.num_processes = self.ranks.world
        self.writes_files = self.ranks.rank == 0
        # Ranks that share the tokens of a sample all have it, and one of them scores it.
        self.scores_samples = self.ranks.rank % workers.context_parallel == 0
        self._gathered: set[int] = set()
        # Requests that other ranks have and this one has not: see ``_go_through_idle_requests``.
        self._idle_requests: list[RolloutRequest] = []
        self._generation_error: Exception | None = None

    @property
    def max_requests_at_once(self) -> int:
        return super().max_requests_at_once * self.row_ranks.world

    async def _start_steps(
        self, requests_of_steps: Sequence[tuple[int, list[RolloutRequest]]]
    ) -> None:
        # Not around ``start_rollouts``, which may encode prompts: gathered weights and the text
        # encoders need not fit together.
        with self.workers.keep_gathered():
            await super()._start_steps(requests_of_steps)
            self._go_through_idle_requests()

    async def generate_and_score(
        self,
        request: RolloutRequest,
        weights: WeightsVersion | None,
        with_guards: bool = False,
    ) -> RolloutPart:
        if self.scores_samples:
            return await super().generate_and_score(request, weights, with_guards)
        rollouts, images, report = await self.generate_request(request, weights)
        # ``_gather_parts`` puts the scores of the rank that has them in place of these.
        scores = ScoreTable.create_failed(
            len(request), list(self.workers.reward_weights), "another rank scores this request"
        )
        return RolloutPart(request, rollouts, images, report, scores, report.spans, {})

    async def generate_request(
        self, request: RolloutRequest, weights: WeightsVersion | None
    ) -> tuple[Handle, Handle, RolloutReport]:
        # Once a request has failed, this rank generates nothing more: the other ranks are in the
        # passes of that request, and those of another would meet them there.
        if self._generation_error:
            raise self._generation_error
        try:
            return await super().generate_request(request, weights)
        except Exception as error:
            self._generation_error = error
            raise

    async def next_batch(self, version: int) -> RolloutBatch:
        await self._gather_step(self.in_flight[0])
        return await super().next_batch(version)

    async def add_prompts(self, batch: RolloutBatch, prompts: Sequence[Prompt]) -> None:
        requests = await self.build_requests(batch.step, prompts=prompts)
        parts = await self.generate_and_score_all(requests, self.weights)
        batch.requests += requests
        batch.tasks += [_build_done_task(part) for part in parts]

    async def wait_until_done(self) -> None:
        for step in self.in_flight:
            await self._gather_step(step)

    async def generate_and_score_all(
        self,
        requests: Sequence[RolloutRequest],
        weights: WeightsVersion,
        with_guards: bool = False,
    ) -> list[RolloutPart]:
        owners = self._deal_requests(len(requests))
        with self.workers.keep_gathered():
            tasks = [
                asyncio.ensure_future(self.generate_and_score(request, weights, with_guards))
                for request, owner in zip(requests, owners, strict=True)
                if owner == self.row_ranks.rank
            ]
            self._note_idle_requests(requests)
            # One turn of the event loop, in which the worker of this process generates them all
            # (``RolloutQueue._start_steps``).
            await asyncio.sleep(0)
            self._go_through_idle_requests()
        own = await self._wait_for_scores(tasks, requests[0].step)
        return self._gather_parts(requests, owners, own)

    def _start_requests(self, step: int, requests: list[RolloutRequest]) -> RolloutBatch:
        owners = self._deal_requests(len(requests))
        self._note_idle_requests(requests)
        own_requests = [
            request
            for request, owner in zip(requests, owners, strict=True)
            if owner == self.row_ranks.rank
        ]
        own = super()._start_requests(step, own_requests)
        own_tasks = iter(own.tasks)
        loop = asyncio.get_running_loop()
        tasks = [
            # Of another rank: ``_gather_step`` puts the result in its place.
            next(own_tasks) if owner == self.row_ranks.rank else loop.create_future()
            for owner in owners
        ]
        return replace(own, requests=requests, tasks=tasks)

    def _go_through_idle_requests(self) -> None:
        """Generate what nobody needs: every pass of a sharded model is a collective call, so a rank
        with a request less than others goes through the passes of one all the same.

        Raises:
            whatever ended a request of this rank: nobody waits for it before the next collective
            call, which the other ranks would meet with a pass.
        """
        if self._generation_error:
            raise self._generation_error
        if self.workers.trainer.updater.policy.sharded:
            for request in self._idle_requests:
                self.workers.rollout_worker.generate(request, self.weights)
        self._idle_requests = []

    def _note_idle_requests(self, requests: Sequence[RolloutRequest]) -> None:
        owners = self._deal_requests(len(requests))
        largest = math.ceil(len(requests) / self.row_ranks.world)
        num_idle = largest - owners.count(self.row_ranks.rank)
        self._idle_requests += [requests[0]] * num_idle

    def _deal_requests(self, count: int) -> list[int]:
        """Deal out requests in runs of about as many: the rank of each, where ranks that share
        tokens are one.
        """
        shares = np.array_split(np.arange(count), self.row_ranks.world)
        return [rank for rank, share in enumerate(shares) for _ in share]

    async def _gather_step(self, step: RolloutBatch) -> None:
        """Put the results of all ranks into a step, once this rank's own requests are scored."""
        if step.step in self._gathered:
            return
        owners = self._deal_requests(len(step.tasks))
        own = await self._wait_for_scores(
            [
                task
                for task, owner in zip(step.tasks, owners, strict=True)
                if owner == self.row_ranks.rank
            ],
            step.step,
        )
        parts = self._gather_parts(step.requests, owners, own)
        step.tasks = [_build_done_task(part) for part in parts]
        self._gathered.add(step.step)

    async def _wait_for_scores(
        self, tasks: Sequence[asyncio.Future[RolloutPart]], step: int
    ) -> list[RolloutPart]:
        """Wait until this rank's own requests of a step are scored.

        Raises:
            StageError: none of them was scored for ``MAX_SCORING_MINUTES``.
            whatever ended one of the requests.
        """
        running = set(tasks)
        while running:
            # Anew for each request: rewards that are slow on every rank alike do not hang.
            done, running = await asyncio.wait(
                running, timeout=60 * MAX_SCORING_MINUTES, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()  # a request that failed ends the wait for the others
            if not done:
                for task in running:
                    task.cancel()
                raise self._explain_hang(len(running), len(tasks), step)
        return [task.result() for task in tasks]

    def _explain_hang(self, num_missing: int, num_requests: int, step: int) -> StageError:
        """Return the error of a rank whose rewards hang."""
        scoring = self.ctx.online_config.scoring
        rewards = ", ".join(self.workers.reward_weights)
        return StageError(
            f"rank {self.ranks.rank} of {self.ranks.world} has waited"
            f" {MAX_SCORING_MINUTES:g} minutes for the rewards of {num_missing} of its"
            f" {num_requests} requests of step {step} ({rewards}), none of which came, and all"
            " other ranks wait for it. Look at the servers and the log of these rewards;"
            f" scoring.timeout = {scoring.timeout:g} s and scoring.retries = {scoring.retries} let"
            " a part without scores go sooner"
        )

    def _gather_parts(
        self,
        requests: Sequence[RolloutRequest],
        owners: Sequence[int],
        own: Sequence[RolloutPart],
    ) -> list[RolloutPart]:
        """Gather what all ranks need to know of each request; rollouts and images stay where they
        are.
        """
        # Every rank has the requests already.
        sent = [
            (
                part.report,
                part.scores,
                part.spans,
                part.statistics,
                RolloutsHeader.from_rollouts(part.rollouts),
            )
            for part in own
        ]
        gathered = gather_objects(sent)
        for rank, others in enumerate(gathered):
            if rank != self.ranks.rank:  # the queue has the spans of its own requests already
                self.spans += [span for _, _, spans, _, _ in others for span in spans]
        # Ranks have requests in runs, so one list after another is in the order of the requests.
        # Of the ranks that share tokens the first has scored them.
        scored = gathered[:: self.workers.context_parallel]
        values = iter(own)
        parts = []
        for request, owner, known in zip(requests, owners, chain(*scored), strict=True):
            report, scores, spans, statistics, header = known
            part = next(values) if owner == self.row_ranks.rank else None
            rollouts = RankValue(owner, len(request), part.rollouts if part else None, header)
            images = RankValue(owner, len(request), part.images if part else None)
            parts.append(RolloutPart(request, rollouts, images, report, scores, spans, statistics))
        return parts


def open_queue(
    ctx: StageContext,
    workers: StageWorkers,
    sampler: PromptSampler,
    embeddings: PromptWindows,
    encode: Callable[[Sequence[Prompt]], Awaitable[Embeddings]],
    first_step: int = 0,
) -> RolloutQueue:
    """Open the queue of the rollouts that these workers generate."""
    if isinstance(workers, ColocatedWorkers):
        return ColocatedQueue(ctx, workers, sampler, embeddings, encode, first_step)
    return RolloutQueue(ctx, workers, sampler, embeddings, encode, first_step)


def _build_done_task(part: RolloutPart) -> asyncio.Future[RolloutPart]:
    task: asyncio.Future[RolloutPart] = asyncio.get_running_loop().create_future()
    task.set_result(part)
    return task
