"""Where an online stage stands between two steps, and its checkpoints: a stage that goes on from one ends with the same bytes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebbflow.algorithms.advantages import PromptStatistics
from ebbflow.online.placement import Placement
from ebbflow.stage import Kept, Place
from ebbflow.training.checkpoint import newest_checkpoint, read_state

KEPT = 2
"""Checkpoints that are kept: the newest, and the one before in case the newest turns out to be damaged."""


@dataclass
class Standing:
    """What the stage's own process knows, beside the training group.

    Attributes:
        history: the rewards of each prompt so far, where ``advantages.running`` wants them.
        step: steps done.
        samples: images generated for training.
        seconds: that the workers were busy, by what with.
        alarms: of the stage, beside those of the training.
    """

    history: PromptStatistics = field(default_factory=PromptStatistics)
    step: int = 0
    samples: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    alarms: list[str] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        return {**vars(self), "history": self.history.state()}

    @staticmethod
    def from_state(state: dict[str, Any]) -> Standing:
        return Standing(**state | {"history": PromptStatistics.from_state(state["history"])})


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a stage, ``step-00010`` and so on; the number is that of the steps done.

    Attributes:
        folder: where they lie, on the disk of the stage's own process.
        saved: called with each new checkpoint, to bring it where a later attempt finds it.
    """

    place: Place
    folder: Path
    saved: Callable[[Path], None] = lambda checkpoint: None

    @property
    def about(self) -> dict[str, str]:
        """Which training they are of."""
        return {"recipe": self.place.recipe.digest, "stage": self.place.label}

    def due(self, step: int) -> bool:
        every = self.place.online.checkpoint_every
        return every is not None and step % every == 0 and step < self.place.online.steps

    def save(self, placement: Placement, standing: Standing, journal: Kept) -> None:
        """Write where the stage stands, and forget all but the last ones."""
        state = {"standing": standing.state(), "rows": journal.metrics}
        new = self.folder / f"step-{standing.step:05d}"
        placement.write(new, "checkpoint", self.about, state)
        for old in sorted(self.folder.glob("step-*"))[:-KEPT]:
            shutil.rmtree(old)
        self.saved(new)

    def resume(self, placement: Placement, journal: Kept) -> Standing | None:
        """Put the training group where it stood at the newest checkpoint, if there is one.

        Raises:
            CheckpointError: it is one of another training.
        """
        newest = newest_checkpoint(self.folder)
        if newest is None:
            return None
        state = read_state(newest, self.about)
        placement.restore(newest)
        journal.resume(state["rows"])
        return Standing.from_state(state["standing"])
