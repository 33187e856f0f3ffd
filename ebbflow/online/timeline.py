"""When every worker of an online stage was busy."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import get_args

from ebbflow.online.messages import TraceSpan
from ebbflow.recipe.online import ResourcesConfig, Role

ROLES: tuple[Role, ...] = get_args(Role)


class Timeline:
    """What the workers of a stage did when, and when its steps were, in seconds since 1970.

    Attributes:
        steps: start and end, by step.
        seconds: that workers were busy, by task.
    """

    def __init__(self, resources: ResourcesConfig, num_processes: int = 1) -> None:
        """``num_processes``: that have so many workers each."""
        # Busy seconds are divided by it: two workers that are busy all the time are 1, not 2.
        self.num_workers = {role: num_processes * getattr(resources, role).count for role in ROLES}
        self.spans: list[TraceSpan] = []
        self.steps: dict[int, tuple[float, float]] = {}
        self.seconds: dict[str, float] = {}
        self._by_step: dict[int, list[TraceSpan]] = defaultdict(list)

    def add_spans(self, spans: Iterable[TraceSpan]) -> None:
        for span in spans:
            self.spans.append(span)
            self._by_step[span.step].append(span)
            self.seconds[span.task] = self.seconds.get(span.task, 0.0) + span.seconds

    def compute_utilisation(self, step: int, steps_ahead: int) -> dict[str, float]:
        """The share of a step's time in which the workers of each role were busy, between 0 and 1;
        empty for an unknown step.

        In the time of a step, workers are also busy with up to ``steps_ahead`` steps before and
        after it.
        """
        if step not in self.steps:
            return {}
        start, end = self.steps[step]
        busy = dict.fromkeys(ROLES, 0.0)
        # Only steps that can overlap in time: all spans would cost more with every step.
        for near in range(step - steps_ahead, step + steps_ahead + 1):
            for span in self._by_step[near]:
                busy[span.role] += max(0.0, min(end, span.end) - max(start, span.start))
        return {
            f"utilisation/{role}": busy[role] / (self.num_workers[role] * (end - start))
            for role in ROLES
        }

    def encode_json(self) -> bytes:
        """All of it as JSON."""
        steps = [
            {"step": step, "start": start, "end": end} for step, (start, end) in self.steps.items()
        ]
        # Profiles are large binary files, which the monitor logs apart.
        spans = [
            {key: value for key, value in asdict(span).items() if key != "files"}
            for span in self.spans
        ]
        return json.dumps({"steps": steps, "spans": spans}, indent=1).encode()

    def render_png(self) -> bytes:
        """PNG of the last steps."""
        # Here, because matplotlib takes a second to import.
        from ebbflow.plots.charts import Span, plot_timeline

        ordered = sorted(self.spans, key=lambda span: ROLES.index(span.role))
        return plot_timeline(
            [Span(span.role, span.worker, span.task, span.start, span.end) for span in ordered],
            self.steps,
        )


def sum_seconds_by_task(spans: Iterable[TraceSpan]) -> dict[str, float]:
    """Seconds that workers were busy, by task."""
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.task] = seconds.get(span.task, 0.0) + span.seconds
    return seconds


def add_seconds(*seconds: Mapping[str, float]) -> dict[str, float]:
    """Add up seconds by task; a part may lack some of the tasks."""
    names = dict.fromkeys(name for part in seconds for name in part)
    return {name: sum(part.get(name, 0.0) for part in seconds) for name in names}
