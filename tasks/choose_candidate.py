"""Choose the candidate for promotion: the trained policy with the best validation reward."""

from __future__ import annotations

from flytekit import task

from ebbflow.data.records import TrackedRun
from ebbflow.evaluation.selection import find_best_policy
from tasks.cache import ONCE_PER_RUN
from tasks.resources import light_resources
from tasks.types import EvaluatedPolicy


@task(cache=ONCE_PER_RUN, **light_resources())
def choose_candidate(run: TrackedRun, history: list[EvaluatedPolicy]) -> EvaluatedPolicy:
    """Choose the best policy of the run. The held-out prompts do not count here, so that they can
    decide in the gate.
    """
    from ebbflow.tracking.child_run import open_node_run

    with open_node_run(run, "candidate") as run_logger:
        best = find_best_policy([evaluated.evaluation for evaluated in history])
        candidate = history[best]
        run_logger.log_params({"candidate": candidate.evaluation.label})
    return candidate
