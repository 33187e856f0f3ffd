"""Traces of a worker's work: torch's profiler, and the memory of a GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

TRACE, MEMORY = "json.gz", "memory.pickle"
"""Endings of a Chrome trace, and of a snapshot that https://pytorch.org/memory_viz shows."""
MAX_EVENTS = 200_000
"""Allocations that a snapshot remembers; of more, the last ones."""


@contextmanager
def profiled() -> Iterator[dict[str, bytes]]:
    """Yield what holds the profile's files by their endings once the block has ended.

    torch has one profiler per process, so only one thread of a process may be in such a block.
    """
    files: dict[str, bytes] = {}
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS, stacks="python")
    try:
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
            yield files
        with tempfile.TemporaryDirectory() as folder:
            trace, memory = Path(folder) / f"trace.{TRACE}", Path(folder) / MEMORY
            profiler.export_chrome_trace(str(trace))
            files[TRACE] = trace.read_bytes()
            if on_gpu:
                torch.cuda.memory._dump_snapshot(str(memory))
                files[MEMORY] = memory.read_bytes()
    finally:
        if on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
