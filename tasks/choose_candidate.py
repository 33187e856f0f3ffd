"""The candidate for promotion: the trained policy that the validation prompts like best."""

from __future__ import annotations

from flytekit import task

from ebbflow.evaluation.selection import best
from tasks.resources import light
from tasks.types import EvaluatedPolicy


@task(**light())
def choose_candidate(history: list[EvaluatedPolicy]) -> EvaluatedPolicy:
    """The best of everything trained; the held-out prompts have no say, so that they can judge it."""
    return history[best([evaluated.evaluation for evaluated in history])]
