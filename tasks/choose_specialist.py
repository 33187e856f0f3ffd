"""Choose what a branch hands on: its best policy if that passes the gate, else the policy that it
began with.
"""

from __future__ import annotations

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.evaluation.selection import find_best_policy
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import make_node_output
from tasks.resources import scorer_resources
from tasks.score_both_sides import score_sides
from tasks.types import EvaluatedPolicy, SpecialistPolicy


@task(cache=ONCE_PER_RUN, **scorer_resources())
def choose_specialist(
    recipe: Recipe,
    run: TrackedRun,
    prompts: FlyteFile,
    round: int,
    branch: str,
    history: list[EvaluatedPolicy],
) -> SpecialistPolicy:
    """Run the gate of a branch on new scores of both sides' pictures, as the gate of the run does.
    The first of ``history`` is the policy that the branch began with, ``prompts`` are the branch's.
    """
    from ebbflow.compute import require_requested_gpus, use_deterministic_kernels
    from ebbflow.evaluation.gate import decide_by_gate
    from ebbflow.evaluation.gate_scores import refuse_unequal_scores
    from ebbflow.storage.tables import read_table
    from ebbflow.tracking.child_run import open_node_run
    from ebbflow.tracking.nodes import log_decision

    # The start stands for the champion: a branch that made its policy worse must not teach with it.
    start = history[0]
    candidate = history[find_best_policy([evaluated.evaluation for evaluated in history])]
    sides = {"candidate": candidate, "champion": start}
    if recipe.deterministic:
        use_deterministic_kernels()
    require_requested_gpus()
    node = f"{recipe.branch_label(round, branch)} gate"
    paths = {side: make_node_output(run, node, f"{side}.parquet") for side in sides}
    branch_recipe = recipe.select_branch(branch)
    with open_node_run(run, node) as run_logger:
        evaluations = score_sides(branch_recipe, prompts, sides, paths, run_logger)
        samples = [read_table(paths[side]) for side in sides]
        decision = decide_by_gate(
            branch_recipe, evaluations["candidate"], evaluations["champion"], *samples
        )
        decision = refuse_unequal_scores(decision, *samples)
        log_decision(run_logger, decision)
    chosen = candidate if decision.promote else start
    # Without the start, whose stages are of rounds before and already in the run's history.
    stages = [stage for evaluated in history[1:] for stage in evaluated.policy.finished_stages]
    return SpecialistPolicy(branch=branch, policy=chosen.policy, decision=decision, stages=stages)
