"""The candidate for promotion: the trained policy that the validation prompts like best."""

from __future__ import annotations

from flytekit import task

from ebbflow.data.records import TrackedRun
from ebbflow.evaluation.selection import best
from tasks.cache import ONCE_PER_RUN
from tasks.resources import light
from tasks.types import EvaluatedPolicy


@task(cache=ONCE_PER_RUN, **light())
def choose_candidate(run: TrackedRun, history: list[EvaluatedPolicy]) -> EvaluatedPolicy:
    """The best of everything trained; the held-out prompts have no say, so that they can judge it."""
    from ebbflow.tracking.child_run import node_run

    with node_run(run, "candidate") as node:
        chosen = history[best([evaluated.evaluation for evaluated in history])]
        node.log_params({"candidate": chosen.evaluation.label})
    return chosen
