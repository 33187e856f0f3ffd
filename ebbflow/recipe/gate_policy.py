"""What a candidate has to pass, as it is pinned to a registered model: a recipe may ask for more
and never for less.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from ebbflow.recipe.base import Strict
from ebbflow.recipe.promotion import PromotionConfig

if TYPE_CHECKING:
    from ebbflow.recipe.recipe import Recipe

DEFAULT = PromotionConfig()
GLYPH_SOURCE = "random strings"
"""The source of held-out prompts that no file has."""


class PinnedTolerance(Strict):
    """How far a guardrail may fall: on its own scale, or in standard deviations."""

    value: float
    absolute: bool


class GatePolicy(Strict):
    """The rules of the gate of a registered model.

    Example:
        >>> GatePolicy(
        ...     held_out_source="prompts/signs.txt",
        ...     held_out=128,
        ...     confidence=0.95,
        ...     guardrails={"ocr": PinnedTolerance(value=0.1, absolute=False)},
        ...     margins={"entropy": 2.5},
        ...     max_failed_share=0.05,
        ...     approval=False,
        ... )
    """

    held_out_source: str
    """Where the held-out prompts come from. The set itself may be drawn anew for every run."""
    held_out: int
    """Number of held-out prompts."""
    confidence: float
    error_budget: float = DEFAULT.error_budget
    """Probability of a false promotion in a year."""
    look_error: float = DEFAULT.error_budget / DEFAULT.looks_per_year
    """Share of the error budget that a look may spend."""
    anchor_tolerance: float | None = DEFAULT.anchor_tolerance
    """How far reward and guardrails may lie below the anchor; None asks for no comparison."""
    guardrails: dict[str, PinnedTolerance]
    """By column. All of them must be measured."""
    margins: dict[str, float]
    """Of the image statistics that are tested."""
    max_failed_share: float
    approval: bool
    """Whether a person is asked."""
    rewards: dict[str, float] = {}
    """Weights of the trained rewards, by column; empty where none are pinned."""
    reward_weights: dict[str, str] = {}
    """What rewards and guardrails were loaded from, as digests by column: known once a gate has
    decided.
    """
    held_out_digest: str = ""
    """Of the held-out prompts of a file; empty where they are drawn anew for every run."""


def build_gate_policy(
    recipe: Recipe,
    measured: Collection[str] | None = None,
    *,
    held_out_digest: str = "",
    reward_weights: Mapping[str, str] | None = None,
) -> GatePolicy:
    """Return the rules that a recipe gives its gate.

    Args:
        measured: columns of the guardrails that an evaluation has measured; None counts all that
            the recipe has.
        held_out_digest, reward_weights: of an evaluation; left out before there is one.
    """
    prompts = recipe.prompts
    rule = recipe.promotion.guardrail_tolerance
    guardrails = {}
    for config in recipe.guardrails:
        name = config.column
        if measured is not None and name not in measured:
            continue
        absolute = rule.absolute.get(name)
        share = rule.standard_deviations.get(name, rule.default)
        guardrails[name] = PinnedTolerance(
            value=share if absolute is None else absolute, absolute=absolute is not None
        )
    margins = recipe.promotion.margins.model_dump()
    held_out_source = prompts.held_out_source or ", ".join(prompts.source_files)
    return GatePolicy(
        held_out_source=held_out_source or GLYPH_SOURCE,
        held_out=prompts.held_out,
        confidence=recipe.evaluation.confidence,
        error_budget=recipe.promotion.error_budget,
        look_error=recipe.promotion.error_budget / recipe.promotion.looks_per_year,
        anchor_tolerance=recipe.promotion.anchor_tolerance,
        guardrails=guardrails,
        margins={name: margin for name, margin in margins.items() if margin is not None},
        max_failed_share=recipe.max_failed_share,
        approval=recipe.promotion.approval is not None,
        rewards={reward.column: reward.weight for reward in recipe.rewards},
        reward_weights=dict(reward_weights or {}),
        # Random strings are a run's own.
        held_out_digest=held_out_digest if held_out_source else "",
    )


def list_laxer_rules(pinned: GatePolicy, proposed: GatePolicy) -> list[str]:
    """List where ``proposed`` asks for less than ``pinned``, a line each; empty where it asks for
    as much or more.
    """
    laxer = []
    if proposed.held_out_source != pinned.held_out_source:
        laxer.append(
            f"held-out prompts of {proposed.held_out_source!r}, not of {pinned.held_out_source!r}"
        )
    at_least = {"prompts.held_out": "held_out", "evaluation.confidence": "confidence"}
    for key, name in at_least.items():
        if getattr(proposed, name) < getattr(pinned, name):
            laxer.append(f"{key} = {getattr(proposed, name):g}, below {getattr(pinned, name):g}")
    if proposed.max_failed_share > pinned.max_failed_share:
        laxer.append(
            f"max_failed_share = {proposed.max_failed_share:g}, above {pinned.max_failed_share:g}"
        )
    # Both: with more looks a larger budget has the same share, and lasts for more of them.
    if proposed.error_budget > pinned.error_budget:
        laxer.append(
            f"promotion.error_budget = {proposed.error_budget:g}, above {pinned.error_budget:g}"
        )
    if proposed.look_error > pinned.look_error:
        laxer.append(
            f"promotion.error_budget / looks_per_year = {proposed.look_error:.2g}, above"
            f" {pinned.look_error:.2g}"
        )
    tolerance = proposed.anchor_tolerance
    if pinned.anchor_tolerance is not None and (
        tolerance is None or tolerance > pinned.anchor_tolerance
    ):
        value = "null" if tolerance is None else f"{tolerance:g}"
        laxer.append(f"promotion.anchor_tolerance = {value}, above {pinned.anchor_tolerance:g}")
    if pinned.approval and not proposed.approval:
        laxer.append("no promotion.approval, and a person must approve")
    laxer += _list_other_inputs(pinned, proposed)
    laxer += _list_laxer_guardrails(pinned, proposed)
    for name, margin in pinned.margins.items():
        proposed_margin = proposed.margins.get(name)
        if proposed_margin is None or proposed_margin > margin:
            value = "null" if proposed_margin is None else f"{proposed_margin:g}"
            laxer.append(f"promotion.margins.{name} = {value}, above {margin:g}")
    return laxer


def _list_other_inputs(pinned: GatePolicy, proposed: GatePolicy) -> list[str]:
    """List where the rewards or the held-out prompts are not those that the champion had to pass;
    what is not known on a side is not compared.
    """
    other = []
    # More prompts are another set, and no easier one to pick by chance.
    is_same_size = proposed.held_out <= pinned.held_out
    digests = {pinned.held_out_digest, proposed.held_out_digest}
    if is_same_size and "" not in digests and len(digests) > 1:
        other.append(
            f"other held-out prompts of {proposed.held_out_source!r} (the file has changed)"
        )
    if pinned.rewards and proposed.rewards != pinned.rewards:
        other.append(
            f"rewards {_format_weights(proposed.rewards)}, not {_format_weights(pinned.rewards)}"
        )
    for name, digest in pinned.reward_weights.items():
        if proposed.reward_weights.get(name, digest) != digest:
            other.append(f"{name} is loaded from other weights")
    return other


def _format_weights(rewards: Mapping[str, float]) -> str:
    return " + ".join(f"{weight:g} {name}" for name, weight in sorted(rewards.items()))


def _list_laxer_guardrails(pinned: GatePolicy, proposed: GatePolicy) -> list[str]:
    laxer = []
    for name, tolerance in pinned.guardrails.items():
        other = proposed.guardrails.get(name)
        unit = "on its own scale" if tolerance.absolute else "standard deviations"
        if other is None:
            laxer.append(f"guardrail {name} is not measured")
        elif other.absolute != tolerance.absolute:
            laxer.append(f"the tolerance of guardrail {name} is not stated {unit}")
        elif other.value > tolerance.value:
            laxer.append(
                f"guardrail {name} may fall by {other.value:g} {unit}, more than"
                f" {tolerance.value:g}"
            )
    return laxer
