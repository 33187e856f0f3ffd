"""When a worker was busy, what with, and profiles of its work: torch's profiler and the memory of a
GPU.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ebbflow.recipe.online import Role

TRACE_SUFFIX = "json.gz"
MEMORY_SUFFIX = "memory.pickle"
"""Endings of a Chrome trace, and of a snapshot that https://pytorch.org/memory_viz shows."""
MAX_MEMORY_EVENTS = 200_000
"""Allocations that a snapshot keeps: the last ones."""


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


@dataclass
class TaskTimer:
    """Times the tasks of a worker. Of each step that is to be profiled, it profiles the first
    task."""

    role: Role
    worker: int
    spans: list[TraceSpan] = field(default_factory=list)
    profiled_steps: set[int] = field(default_factory=set)

    @contextmanager
    def time_task(self, name: str, step: int, profiled: bool = False) -> Iterator[None]:
        # One profile for each step and worker, however many requests of the step it gets.
        first = profiled and step not in self.profiled_steps
        profiler: AbstractContextManager[dict[str, bytes]] = (
            profile_block() if first else nullcontext({})
        )
        # The profiler's own start and end are no part of the task; they are the span "profile".
        with profiler as files:
            start = time.time()
            yield
            end = time.time()
        self.spans.append(TraceSpan(self.role, self.worker, name, step, start, end, files))
        if first:
            self.profiled_steps.add(step)
            self.spans.append(TraceSpan(self.role, self.worker, "profile", step, end, time.time()))

    def drain_spans(self) -> list[TraceSpan]:
        """The spans since the last call."""
        spans = self.spans
        self.spans = []
        return spans


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
