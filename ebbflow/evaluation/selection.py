"""Which policy of a run is best, and when to stop. Only the validation prompts count."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ebbflow.data.records import Evaluation
from ebbflow.recipe import Recipe

TARGET = "reward"


def find_best_policy(history: Sequence[Evaluation]) -> int:
    """Index of the trained policy with the highest validation reward; the first entry is the
    untrained one.
    """
    trained = range(1, len(history))
    return max(trained, key=lambda index: _validation_reward(history[index]))


def find_stop_reason(recipe: Recipe, history: Sequence[Evaluation], rounds_done: int) -> str | None:
    """Why training ends before round ``rounds_done``, or None if it continues.

    Args:
        history: the evaluation before training, then one per stage that is in no branch.
        rounds_done: rounds trained so far.
    """
    if rounds_done >= recipe.rounds:
        return f"stop: all {recipe.rounds} rounds are done"
    per_round = sum(stage.branch is None for stage in recipe.stages)
    ends = [_validation_reward(history[index]) for index in range(0, len(history), per_round)]
    earlier = ends[: -recipe.stop.patience]
    recent = ends[-recipe.stop.patience :]
    if not earlier or max(recent) > max(earlier) + recipe.stop.min_delta:
        return None
    return (
        f"stop after {rounds_done} of {recipe.rounds} rounds: in stop.patience ="
        f" {recipe.stop.patience} rounds the validation reward did not rise above"
        f" {max(earlier):.3f} by more than stop.min_delta = {recipe.stop.min_delta}"
    )


def _validation_reward(evaluation: Evaluation) -> float:
    """The mean validation reward; -inf if nothing was scored."""
    return evaluation.validation.get(TARGET, -math.inf)
