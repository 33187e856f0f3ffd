"""A sink that appends the curves of a run to a text file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ebbflow.data.records import TrackedRun


class TextFile:
    """A line per step: ``12 reward/train=0.31``."""

    package = None  # needs nothing that Ebbflow does not install

    def __init__(self, tracked: TrackedRun, node: str) -> None:
        self.path = Path(tracked.folder, f"curves-{node.replace(' ', '-')}.txt")
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def log(self, values: Mapping[str, float], step: int) -> None:
        with self.path.open("a") as file:
            print(step, *(f"{name}={value:.4g}" for name, value in values.items()), file=file)

    def close(self) -> None:
        """Every line is already in the file."""
