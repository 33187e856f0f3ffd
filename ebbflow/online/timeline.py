"""When every worker of an online stage was busy."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from typing import get_args

from ebbflow.online.work import Busy
from ebbflow.recipe.online import ResourcesConfig, Role

ROLES: tuple[Role, ...] = get_args(Role)


class Timeline:
    """What the workers of a stage did when, and when its steps were, in seconds since 1970.

    Attributes:
        steps: beginning and end, by number.
        seconds: that the workers were busy, by what with.
    """

    def __init__(self, resources: ResourcesConfig) -> None:
        self.workers = {role: getattr(resources, role).count for role in ROLES}
        self.busy: list[Busy] = []
        self.steps: dict[int, tuple[float, float]] = {}
        self.seconds: dict[str, float] = {}
        self._of_step: dict[int, list[Busy]] = defaultdict(list)

    def add(self, busy: Iterable[Busy]) -> None:
        for one in busy:
            self.busy.append(one)
            self._of_step[one.step].append(one)
            self.seconds[one.task] = self.seconds.get(one.task, 0.0) + one.seconds

    def utilisation(self, step: int, lead: int) -> dict[str, float]:
        """The share of a step's time in which the workers of each role were busy, between 0 and 1; nothing of no step.

        In the time of a step, workers are also busy with steps up to ``lead`` before and after it.
        """
        if step not in self.steps:
            return {}
        start, end = self.steps[step]
        spent = dict.fromkeys(ROLES, 0.0)
        for busy in (busy for number in range(step - lead, step + lead + 1) for busy in self._of_step[number]):
            spent[busy.role] += max(0.0, min(end, busy.end) - max(start, busy.start))
        return {f"utilisation/{role}": spent[role] / (self.workers[role] * (end - start)) for role in ROLES}

    def table(self) -> bytes:
        """All of it as JSON."""
        steps = [{"step": step, "start": start, "end": end} for step, (start, end) in self.steps.items()]
        busy = [{key: value for key, value in asdict(one).items() if key != "files"} for one in self.busy]
        return json.dumps({"steps": steps, "busy": busy}, indent=1).encode()

    def picture(self) -> bytes:
        """PNG of the last steps."""
        from ebbflow.plots.charts import Span, timeline  # imports matplotlib, which takes a second

        ordered = sorted(self.busy, key=lambda busy: ROLES.index(busy.role))
        return timeline([Span(one.role, one.worker, one.task, one.start, one.end) for one in ordered], self.steps)


def seconds_by_task(busy: Iterable[Busy]) -> dict[str, float]:
    """Seconds that workers were busy, by what with."""
    seconds: dict[str, float] = {}
    for one in busy:
        seconds[one.task] = seconds.get(one.task, 0.0) + one.seconds
    return seconds
