"""The choice of the best policy of a run, and of when to stop. Only the validation prompts
count."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ebbflow.data.records import Evaluation
from ebbflow.recipe import Recipe

TARGET = "reward"


def find_best_policy(history: Sequence[Evaluation]) -> int:
    """Return the index of the trained policy with the highest validation reward; the first entry is
    the untrained one.
    """
    # The untrained policy cannot be the candidate: the gate compares with it, or with a champion.
    trained = range(1, len(history))
    return max(trained, key=lambda index: _validation_reward(history[index]))


def find_stop_reason(recipe: Recipe, history: Sequence[Evaluation], rounds_done: int) -> str | None:
    """Return why training ends before round ``rounds_done``, or None if it continues.

    Example:
        Two stages in no branch, ``stop.patience`` = 2: after 3 rounds ``history`` has 1 + 6
        entries, and the ends of the rounds are those at 0, 2, 4 and 6. Training stops if neither 4
        nor 6 is better than the best of 0 and 2 by more than ``stop.min_delta``.

    Args:
        history: the evaluation before training, then one per stage that is in no branch. The first
            round may have further ones, of its stages ``only_from_base``.
        rounds_done: rounds trained so far.
    """
    if rounds_done >= recipe.rounds:
        return f"stop: all {recipe.rounds} rounds are done"
    # A round is judged by its last stage alone.
    per_round = sum(stage.branch is None and not stage.only_from_base for stage in recipe.stages)
    # Counted from the end: the first round may have more stages.
    last = len(history) - 1
    indices = [0, *(last - per_round * after for after in reversed(range(rounds_done)))]
    ends = [_validation_reward(history[index]) for index in indices]
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
    """Return the mean validation reward; -inf if nothing was scored."""
    return evaluation.validation.get(TARGET, -math.inf)
