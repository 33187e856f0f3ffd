"""The guardrails of a recipe that names none: those that its pictures can be scored with."""

from __future__ import annotations

from collections.abc import Iterable

from ebbflow.recipe.families import find_family
from ebbflow.recipe.registry import AnyRewardConfig, configure_reward
from ebbflow.recipe.rewards import RewardConfig

MIN_PROMPTS = 24
"""Prompts on which a gate compares a metric at least, the reward and each guardrail, the gate of a
run and that of a branch: enough for every error in the simulation of ``benchmarks.gate`` to be at
most 3 %. A guardrail that falls on one prompt in six falls on none of 16 prompts in 6 % of looks,
and a test that passes an unchanged guardrail passes those; of 24 prompts it is 1.5 %.
"""

# The default of the field ``Recipe.guardrails`` as well: the digest counts a key as set when its
# value is not the field's default, so another list here would change the digest of every recipe of
# the glyph model without guardrails.
DEFAULT_GUARDRAILS: tuple[AnyRewardConfig, ...] = (
    configure_reward("tesseract"),
    configure_reward("similarity"),
)
"""Two that read one line of text which fills the picture, as the glyph model draws it."""


def choose_guardrails(family: str, rewards: Iterable[RewardConfig]) -> list[AnyRewardConfig]:
    """Return the guardrails of a recipe that names none.

    Example:
        >>> choose_guardrails("glyph", [configure_reward("similarity")])
        [TesseractConfig(name='tesseract', ...)]
        >>> choose_guardrails("sd3", [configure_reward("pickscore")])
        []

    Args:
        family: ``model.family``.
        rewards: all that some stage trains on.
    """
    record = find_family(family)
    # In photographs the two read noise: a guardrail that falls by chance would refuse good
    # policies. A family of the user's own without a record may draw like the glyph model.
    if record is not None and not record.trains_base_model:
        return []
    # What is trained on shows nothing about gaming, with a label of its own too; and a reward whose
    # label is the guardrail's name would share the column of its scores.
    trained = {name for reward in rewards for name in (reward.name, reward.column)}
    return [guardrail for guardrail in DEFAULT_GUARDRAILS if guardrail.column not in trained]
