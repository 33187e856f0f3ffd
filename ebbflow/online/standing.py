"""Where an online stage stands, beside its training group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ebbflow.algorithms.advantages import PromptStatistics


@dataclass
class Standing:
    """What the stage's own process knows, and finds again in a checkpoint.

    Attributes:
        history: the rewards of each prompt so far, where ``advantages.running`` wants them.
        step: steps done.
        samples: images generated for training.
        updates: optimiser steps.
        seconds: that the workers were busy, by what with.
        elapsed: seconds of the stage so far.
        alarms: of the stage.
        training_alarms: of the training group.
    """

    history: PromptStatistics = field(default_factory=PromptStatistics)
    step: int = 0
    samples: int = 0
    updates: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    elapsed: float = 0.0
    alarms: list[str] = field(default_factory=list)
    training_alarms: list[str] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        return {**vars(self), "history": self.history.state()}

    def take_over(self, state: dict[str, Any]) -> None:
        """Become what ``state`` was asked of."""
        vars(self).update(state | {"history": PromptStatistics.from_state(state["history"])})
