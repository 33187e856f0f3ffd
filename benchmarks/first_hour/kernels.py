"""What torch's profiler says of a call on the device: its kernels, and how long it was idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class DeviceTime:
    """The work of a call on the device.

    Attributes:
        kernels: that ran, copies included.
        milliseconds: from the beginning of the first to the end of the last.
        idle: the share of that time in which none ran.
    """

    kernels: int
    milliseconds: float
    idle: float


def profile_call(call: Callable[[], Any]) -> DeviceTime:
    """Profile one call on the device, after two to warm up."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        if event.device_type == DeviceType.CUDA
    ]
    return summarize_spans(spans)


def summarize_spans(spans: Sequence[tuple[float, float]]) -> DeviceTime:
    """Summarise kernels' (start, end) in microseconds; several may run at once.

    Example: [(0, 2), (1, 3), (5, 6)] are 3 kernels in .006 ms, idle for a third of it.
    """
    if not spans:
        return DeviceTime(0, 0.0, 1.0)
    ordered = sorted(spans)
    busy = 0.0
    end = ordered[0][0]
    for start, stop in ordered:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    total = end - ordered[0][0]
    return DeviceTime(len(spans), total / 1000, 1 - busy / total)
