"""A decision held to the gate policy that is pinned to its registered model."""

from __future__ import annotations

import logging

from ebbflow.data.records import GateDecision
from ebbflow.evaluation.gate import REFUSED
from ebbflow.recipe import Recipe
from ebbflow.recipe.gate_policy import GatePolicy, build_gate_policy, list_laxer_rules

logger = logging.getLogger(__name__)


def build_measured_policy(recipe: Recipe, decision: GateDecision) -> GatePolicy:
    """Return the rules that a decision was made by: with the guardrails that were compared, the
    held-out prompts, and what the rewards were loaded from.
    """
    return build_gate_policy(
        recipe,
        {comparison.metric for comparison in decision.guardrails},
        held_out_digest=decision.held_out_digest,
        reward_weights=decision.reward_weights,
    )


def hold_to_gate_policy(
    recipe: Recipe, decision: GateDecision, pinned: GatePolicy | None
) -> GateDecision:
    """Return a decision that refuses where the recipe asked for less than is pinned, or a pinned
    guardrail was not compared.

    Args:
        pinned: None before the first promotion, which pins what it passed.
    """
    if pinned is None:
        return decision
    laxer = list_laxer_rules(pinned, build_measured_policy(recipe, decision))
    # A guardrail that failed on samples was refused with its own reason, and is not compared.
    if laxer:
        reason = (
            f"{REFUSED}The gate policy of {recipe.promotion.model_name} asks for more than this run"
            f" did: {'; '.join(laxer)}. `ebbflow gate-policy` shows and changes it."
        )
        logger.warning("gate: %s", reason)
    else:
        reason = f"The run asked for no less than the gate policy of {recipe.promotion.model_name}."
    return decision.model_copy(
        update={
            "promote": decision.promote and not laxer,
            "reasons": [*decision.reasons, reason],
            "policy": pinned,
        }
    )
