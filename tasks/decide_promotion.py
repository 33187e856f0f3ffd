"""Compare the candidate with the champion on the held-out prompts: the gate."""

from __future__ import annotations

from flytekit import task

from ebbflow.data.records import GateDecision, TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact
from tasks.resources import light_resources
from tasks.types import ChampionPolicy, EvaluatedPolicy


@task(cache=ONCE_PER_RUN, **light_resources())
def decide_promotion(
    recipe: Recipe, run: TrackedRun, candidate: EvaluatedPolicy, champion: ChampionPolicy
) -> GateDecision:
    """Decide, and give the reasons; nothing is changed."""
    from ebbflow.evaluation.gate import decide_by_gate
    from ebbflow.storage.tables import read_table
    from ebbflow.tracking.child_run import open_node_run
    from ebbflow.tracking.nodes import log_decision

    with open_node_run(run, "gate") as run_logger:
        decision = decide_by_gate(
            recipe,
            candidate.evaluation,
            champion.evaluated.evaluation,
            read_table(fetch_artifact(candidate.samples)),
            read_table(fetch_artifact(champion.evaluated.samples)),
        )
        log_decision(run_logger, decision)
    return decision
