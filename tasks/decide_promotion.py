"""Compare the candidate with the champion on the held-out prompts: the gate."""

from __future__ import annotations

from flytekit import task

from ebbflow.data.records import GateDecision, TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch
from tasks.resources import light
from tasks.types import ChampionPolicy, EvaluatedPolicy


@task(cache=ONCE_PER_RUN, **light())
def decide_promotion(
    recipe: Recipe, run: TrackedRun, candidate: EvaluatedPolicy, champion: ChampionPolicy
) -> GateDecision:
    """The decision with its reasons; it changes nothing."""
    from ebbflow.evaluation.gate import decide
    from ebbflow.storage.tables import read_table
    from ebbflow.tracking.child_run import node_run
    from ebbflow.tracking.nodes import log_decision

    with node_run(run, "gate") as run_logger:
        decision = decide(
            recipe,
            candidate.evaluation,
            champion.evaluated.evaluation,
            read_table(fetch(candidate.samples)),
            read_table(fetch(champion.evaluated.samples)),
        )
        log_decision(run_logger, decision)
    return decision
