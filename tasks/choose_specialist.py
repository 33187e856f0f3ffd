"""Choose what a branch hands on: its best policy if that passes the gate, else the policy that it
began with.
"""

from __future__ import annotations

from flytekit import task

from ebbflow.data.records import TrackedRun
from ebbflow.evaluation.selection import find_best_policy
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact
from tasks.resources import light_resources
from tasks.types import EvaluatedPolicy, SpecialistPolicy


@task(cache=ONCE_PER_RUN, **light_resources())
def choose_specialist(
    recipe: Recipe, run: TrackedRun, round: int, branch: str, history: list[EvaluatedPolicy]
) -> SpecialistPolicy:
    """Run the gate of a branch. The first of ``history`` is the policy that the branch began
    with.
    """
    from ebbflow.evaluation.gate import decide_by_gate
    from ebbflow.storage.tables import read_table
    from ebbflow.tracking.child_run import open_node_run
    from ebbflow.tracking.nodes import log_decision

    # The start stands for the champion: a branch that made its policy worse must not teach with it.
    start = history[0]
    candidate = history[find_best_policy([evaluated.evaluation for evaluated in history])]
    with open_node_run(run, f"{recipe.branch_label(round, branch)} gate") as run_logger:
        decision = decide_by_gate(
            recipe.select_branch(branch),
            candidate.evaluation,
            start.evaluation,
            read_table(fetch_artifact(candidate.samples)),
            read_table(fetch_artifact(start.samples)),
        )
        log_decision(run_logger, decision)
    chosen = candidate if decision.promote else start
    # Without the start, whose stages are of rounds before and already in the run's history.
    stages = [stage for evaluated in history[1:] for stage in evaluated.policy.finished_stages]
    return SpecialistPolicy(branch=branch, policy=chosen.policy, decision=decision, stages=stages)
