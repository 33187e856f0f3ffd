"""What a replay of a training step gives: its samples as the policy saw them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class ReplayError(Exception):
    """A step that cannot be replayed: says why and what can be done."""


@dataclass(frozen=True)
class ReplayedStep:
    """The samples of a training step.

    Attributes:
        rows: one JSON object per sample, as a dump has them
            (``ebbflow.online.monitor.build_sample_rows``), with ``advantage`` and ``trained``:
            whether it was trained on.
        pngs: the picture of each row.
        metrics: statistics of its scores and advantages, under the names that a stage logs.
    """

    rows: list[dict[str, Any]]
    pngs: list[bytes]
    metrics: dict[str, float]
