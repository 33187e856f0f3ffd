"""What the workers of an online stage send each other: requests, batches, and reports; and the
timer of a worker, whose spans a report carries, with profiles (torch's, and the memory of a GPU).

Large values (rollouts, images) stay where a worker left them. The stage's own process holds handles
to them: on Ray references into the object store, in one process the values themselves.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan
from ebbflow.models import Conditioning
from ebbflow.models.base import Size
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.online import Role
from ebbflow.recipe.rollout_cache import FeatureCacheConfig, Quantization
from ebbflow.rewards.combine import ScoreTable
from ebbflow.rollouts.weights import WeightsVersion

TRACE_SUFFIX = "json.gz"
MEMORY_SUFFIX = "memory.pickle"
"""Endings of a Chrome trace, and of a snapshot that https://pytorch.org/memory_viz shows."""
MAX_MEMORY_EVENTS = 200_000
"""Allocations that a snapshot keeps: the last ones."""

Handle = Any
"""A value that workers can be given, wherever it lies."""


@dataclass(frozen=True)
class TraceSpan:
    """A task of a worker.

    Example:
        ``TraceSpan("rollout", 1, "rollout", step=4, start=1764079200.0, end=1764079203.5)``:
        rollout worker 1 generated for step 4 during 3.5 s.

    Attributes:
        step: the step that the task belongs to.
        start: seconds since 1970, like ``end``.
        files: the task's profile by file suffix, where it was profiled.
    """

    role: Role
    worker: int
    task: str
    step: int
    start: float
    end: float
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class RolloutRequest:
    """Samples that a rollout worker generates in one call: whole groups of one step, about a
    micro-batch.

    Example:
        Two prompts with 4 samples each: ``prompts`` has 8 entries, ``conditioning`` 2 rows,
        ``sample_index`` is [0, 0, 0, 0, 1, 1, 1, 1] and ``keys`` names 8 samples.

    Attributes:
        step: the training step that the samples are for, from zero.
        prompts: [N], the prompt of every sample.
        conditioning: on the CPU, one row per different prompt. Rows are large, so they are repeated
            where they are used.
        sample_index: integer [N], the row of ``conditioning`` of each sample.
        plan: which denoising steps are stochastic and trained.
        size: height and width of the images; None: those of the model.
        cache: of features, for samples to train on; a validation has none.
        quantization: of the network, likewise.
        task: name of the call in the timeline.
        with_sound: whether to decode the sound of the samples: something scores it.
        profiled: whether to profile the call.
    """

    step: int
    prompts: list[Prompt]
    conditioning: Conditioning
    sample_index: np.ndarray
    keys: SampleKeys
    sampler: SamplerConfig
    plan: Plan | None
    task: str = "rollout"
    profiled: bool = False
    size: Size | None = None
    cache: FeatureCacheConfig | None = None
    quantization: Quantization | None = None
    with_sound: bool = False

    @property
    def tree_nodes(self) -> np.ndarray:
        """As of ``RolloutBatch``."""
        # Step s adds the noise with the index s + 1. Samples that share it are one node after the
        # step. One list of [N] for each trained step, transposed to [N, W].
        trained = self.plan.trained if self.plan else ()
        return np.array([self.keys.find_noise_owners(step + 1) for step in trained]).T

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class TrainingReport:
    """A training rank's answer: metrics averaged over the updates of a step, optimiser steps of the
    stage so far, all alarms.
    """

    metrics: dict[str, float]
    updates: int
    alarms: list[str]
    spans: list[TraceSpan]


@dataclass(frozen=True)
class RolloutReport:
    """What a rollout worker says of the samples of a request, whose rollouts and images stay where
    it left them.

    Attributes:
        version: of the weights that generated: training steps of the stage that they have seen.
        receive_seconds: time to receive and verify those weights; 0 where they were loaded already.
        finite: bool [N], whether all numbers of a sample are finite. Other samples cannot be
            scored.
    """

    version: int
    receive_seconds: float
    finite: np.ndarray
    spans: list[TraceSpan]


@dataclass(frozen=True)
class RolloutPart:
    """The samples of a request, generated and scored.

    Example:
        Of a request of 8 samples that the weights of step 12 generated: ``report.version`` is 12,
        ``report.finite`` has 8 entries, ``images`` is a handle of [8, height, width, 3], and
        ``scores`` has 8 rows.

    Attributes:
        rollouts: handle of ``Rollouts`` on the CPU.
        images: handle of uint8 RGB [N, height, width, 3], or of videos, [N, frames, height, width,
            3].
        spans: what all workers did for the request.
        statistics: of the images, float64 [N] columns; NaN where a sample is not finite.
    """

    request: RolloutRequest
    rollouts: Handle
    images: Handle
    report: RolloutReport
    scores: ScoreTable
    spans: list[TraceSpan]
    statistics: dict[str, np.ndarray]


@dataclass
class RolloutBatch:
    """The rollouts of a training step: one task for each of its requests, in their order.

    Example:
        4 prompts with 4 samples each and a ``micro_batch`` of 8: two requests and tasks. Once they
        are done, ``parts`` are two of 8 samples, and ``scores``, ``prompt_ids`` and ``statistics``
        have 16 rows.

    Attributes:
        weights: those that generate it; None takes the newest.
        num_dropped: samples that were too old for training and were generated again.
    """

    step: int
    requests: list[RolloutRequest]
    tasks: list[asyncio.Future[RolloutPart]]
    weights: WeightsVersion | None = None
    num_dropped: int = 0

    @property
    def is_done(self) -> bool:
        return all(task.done() for task in self.tasks)

    @property
    def parts(self) -> list[RolloutPart]:
        """What came of the requests, once all are done; raises what went wrong with one of them."""
        return [task.result() for task in self.tasks]

    @property
    def scores(self) -> ScoreTable:
        return ScoreTable.concatenate([part.scores for part in self.parts])

    @property
    def statistics(self) -> dict[str, np.ndarray]:
        """Statistics of the images of all samples, float64 [N] columns."""
        # All parts have the same names: a part that could not be scored has them with NaN.
        parts = self.parts
        return {
            name: np.concatenate([part.statistics[name] for part in parts])
            for name in parts[0].statistics
        }

    @property
    def spans(self) -> list[TraceSpan]:
        return [span for part in self.parts for span in part.spans]

    @property
    def distinct_prompts(self) -> list[Prompt]:
        """Every prompt once."""
        # A dictionary keeps the first place of each key, so the order is that of the requests.
        return list(
            {
                prompt.prompt_id: prompt for request in self.requests for prompt in request.prompts
            }.values()
        )

    @property
    def size(self) -> Size | None:
        """Height and width of all images; None: those of the model."""
        return self.requests[0].size

    @property
    def prompt_ids(self) -> np.ndarray:
        """integer [N]."""
        return np.array(
            [prompt.prompt_id for request in self.requests for prompt in request.prompts]
        )

    @property
    def tree_nodes(self) -> np.ndarray:
        """The node of each sample of a tree after each of the W trained steps, by the node's first
        sample, integer [N, W].
        """
        return np.concatenate([request.tree_nodes for request in self.requests])

    def compute_staleness(self, version: int) -> list[int]:
        """For every sample, the number of training steps between the policy that generated it and
        ``version``.
        """
        # In mode ``async`` the requests of one step may have been generated by different versions.
        return [version - part.report.version for part in self.parts for _ in part.request.prompts]


@dataclass
class TaskTimer:
    """Times the tasks of a worker. Of each step that is to be profiled, it profiles the first
    task."""

    role: Role
    worker: int
    profiled_steps: set[int] = field(default_factory=set)

    @contextmanager
    def time_task(self, name: str, step: int, profiled: bool = False) -> Iterator[list[TraceSpan]]:
        """Time a block; the yielded list holds its spans once the block has ended."""
        spans: list[TraceSpan] = []
        # One profile for each step and worker, however many requests of the step it gets.
        first = profiled and step not in self.profiled_steps
        profiler: AbstractContextManager[dict[str, bytes]] = (
            profile_block() if first else nullcontext({})
        )
        # The profiler's own start and end are no part of the task; they are the span "profile".
        with profiler as files:
            start = time.time()
            yield spans
            end = time.time()
        spans.append(TraceSpan(self.role, self.worker, name, step, start, end, files))
        if first:
            self.profiled_steps.add(step)
            spans.append(TraceSpan(self.role, self.worker, "profile", step, end, time.time()))


@contextmanager
def profile_block() -> Iterator[dict[str, bytes]]:
    """Profile a block; the yielded dictionary holds the files by suffix once the block has ended.

    torch has one profiler per process, so only one thread of a process may be in such a block.
    """
    files: dict[str, bytes] = {}
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS, stacks="python")
    try:
        with profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        ) as profiler:
            yield files
        # Both writers take a path only, and a trace is compressed by its ending.
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / f"trace.{TRACE_SUFFIX}"
            memory = Path(folder) / MEMORY_SUFFIX
            profiler.export_chrome_trace(str(trace))
            files[TRACE_SUFFIX] = trace.read_bytes()
            if on_gpu:
                torch.cuda.memory._dump_snapshot(str(memory))
                files[MEMORY_SUFFIX] = memory.read_bytes()
    finally:
        if on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
