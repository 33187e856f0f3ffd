"""Choose the candidate for promotion: the trained policy with the best validation reward."""

from __future__ import annotations

from flytekit import task

from ebbflow.data.records import TrackedRun
from ebbflow.evaluation.selection import best
from tasks.cache import ONCE_PER_RUN
from tasks.resources import light
from tasks.types import EvaluatedPolicy


@task(cache=ONCE_PER_RUN, **light())
def choose_candidate(run: TrackedRun, history: list[EvaluatedPolicy]) -> EvaluatedPolicy:
    """The best policy of the run. The held-out prompts do not count here, so that they can decide
    in the gate.
    """
    from ebbflow.tracking.child_run import node_run

    with node_run(run, "candidate") as run_logger:
        chosen = history[best([evaluated.evaluation for evaluated in history])]
        run_logger.log_params({"candidate": chosen.evaluation.label})
    return chosen
