"""Which policy of a run is best, and when to stop: by the validation prompts alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ebbflow.data.records import Evaluation
from ebbflow.recipe import Recipe

TARGET = "reward"


def best(history: Sequence[Evaluation]) -> int:
    """Index of the trained policy with the highest validation reward; the first entry is the untrained one."""
    trained = range(1, len(history))
    return max(trained, key=lambda index: _validation(history[index]))


def stop_reason(recipe: Recipe, history: Sequence[Evaluation], rounds_done: int) -> str | None:
    """Why no further round is trained, or None.

    Args:
        history: the evaluation before training, and one per stage since.
    """
    if rounds_done >= recipe.rounds:
        return f"all {recipe.rounds} rounds of the recipe are done"
    per_round = len(recipe.stages)
    ends = [_validation(history[index]) for index in range(0, len(history), per_round)]
    earlier, recent = ends[: -recipe.stop.patience], ends[-recipe.stop.patience :]
    if not earlier or max(recent) > max(earlier) + recipe.stop.min_delta:
        return None
    return (
        f"stopped after {rounds_done} of {recipe.rounds} rounds: the validation reward has not passed {max(earlier):.3f} "
        f"by more than stop.min_delta = {recipe.stop.min_delta} for stop.patience = {recipe.stop.patience} rounds"
    )


def _validation(evaluation: Evaluation) -> float:
    """The mean validation reward; nothing is worse than none of it scored."""
    return evaluation.validation.get(TARGET, -math.inf)
