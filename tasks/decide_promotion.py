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
    """Decide by the scores of ``score_both_sides``, and give the reasons. The look at the held-out
    prompts is recorded with the registered model; a retry takes the same look.
    """
    from ebbflow.evaluation.gate import Anchor, decide_by_gate
    from ebbflow.evaluation.gate_scores import refuse_unequal_scores
    from ebbflow.evaluation.pinned_policy import hold_to_gate_policy
    from ebbflow.registry.gate_policy import read_gate_policy
    from ebbflow.registry.looks import take_look
    from ebbflow.storage.tables import read_table
    from ebbflow.tracking.child_run import open_node_run
    from ebbflow.tracking.nodes import log_decision

    candidate_samples = read_table(fetch_artifact(candidate.samples))
    champion_samples = read_table(fetch_artifact(champion.evaluated.samples))
    anchor = None
    if champion.anchor:
        samples = read_table(fetch_artifact(champion.anchor.evaluated.samples))
        anchor = Anchor(champion.anchor.label, samples)
    with open_node_run(run, "gate") as run_logger:
        # Before the decision: a look that nobody finishes is spent, too.
        look = take_look(run, recipe.promotion)
        decision = decide_by_gate(
            recipe,
            candidate.evaluation,
            champion.evaluated.evaluation,
            candidate_samples,
            champion_samples,
            look=look,
            anchor=anchor,
            promoted_reward=champion.promoted_reward,
        )
        decision = refuse_unequal_scores(decision, candidate_samples, champion_samples)
        pinned = read_gate_policy(run.tracking_uri, recipe.promotion.model_name)
        decision = hold_to_gate_policy(recipe, decision, pinned)
        log_decision(run_logger, decision)
    return decision
