"""Checks of rewards and guardrails against each other, the prompt sets, the model and the gate."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ebbflow.recipe.base import RecipeError, format_path
from ebbflow.recipe.families import FAMILIES, find_family
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.promotion import GuardrailToleranceConfig
from ebbflow.recipe.prompts import PromptsConfig
from ebbflow.recipe.rewards import (
    GUARDRAIL_COMPARES,
    ONLY_COMPARISONS,
    CustomRewardConfig,
    RewardConfig,
    prompt_sets_without_reward,
    select_trained,
)


class RewardScope(NamedTuple):
    """The rewards of the run, or of one branch.

    Example:
        A branch that trains on the set ``letters`` and names no rewards has those of the run::

            RewardScope(
                branch="letters",
                key="branches.letters.rewards",
                source_key="rewards",
                rewards=[OcrConfig()],
                prompt_sets=["letters"],
            )

    Attributes:
        branch: the name of the branch; None for the run.
        key: the recipe key of this scope.
        source_key: the recipe key that the rewards come from.
        rewards: the rewards that score at least one of ``prompt_sets``.
        prompt_sets: the names of the prompt sets of this scope; empty without ``prompts.mixture``.
    """

    branch: str | None
    key: str
    source_key: str
    rewards: Sequence[RewardConfig]
    prompt_sets: Sequence[str]


def check_reward_names(
    reward_lists: Sequence[Sequence[RewardConfig]], guardrails: Sequence[RewardConfig]
) -> None:
    """Check that no name stands twice, and that no guardrail is trained on or weighted.

    Args:
        reward_lists: the rewards of the run, and those of each branch that has its own.

    Raises:
        ValueError: a name or a weight is wrong; says which and the fix.
    """
    guardrail_names = [config.column for config in guardrails]
    trained_names = [[config.column for config in rewards] for rewards in reward_lists]
    # Scores are columns of tables, which two rewards of one name would share. Branches may repeat
    # the names of the run: their tables are others.
    for names in (*trained_names, guardrail_names):
        if len(set(names)) < len(names):
            raise ValueError(
                f"each reward may be named once, got {names}; give one of them a 'label'"
            )
    # A guardrail shows that a reward is gamed only as long as nothing is trained on it.
    both = {name for names in trained_names for name in names} & set(guardrail_names)
    if both:
        raise ValueError(
            f"{sorted(both)} cannot be trained on and be a guardrail; take it out of 'guardrails'"
        )
    weighted = [guardrail.column for guardrail in guardrails if guardrail.weight != 1]
    if weighted:
        raise ValueError(
            f"a guardrail has no weight, since it is only watched; take it from {weighted}"
        )


def check_guardrails_move_nothing(guardrails: Sequence[RewardConfig]) -> None:
    """Check that no guardrail names latents.

    Raises:
        ValueError: one does.
    """
    for guardrail in guardrails:
        if guardrail.latents:
            raise ValueError(
                f"guardrails: {guardrail.column}.latents says what a reward trains, and a guardrail"
                " is only watched; leave it out"
            )


def check_prompt_sets(
    key: str, rewards: Iterable[RewardConfig], prompt_sets: Sequence[str]
) -> None:
    """Check that the prompt sets that rewards name exist.

    Raises:
        ValueError: one does not; names the key and the sets.
    """
    for reward in rewards:
        unknown = [name for name in reward.prompts if name not in prompt_sets]
        if unknown:
            raise ValueError(
                f"{key}: {reward.column}.prompts names the prompt set {unknown[0]!r}, and there are"
                f" {', '.join(prompt_sets) or 'none'}; name sets of prompts.mixture"
            )


def check_prompt_sets_are_scored(scope: RewardScope) -> None:
    """Check that each prompt set has a reward.

    Raises:
        ValueError: none of the rewards scores a set, or none of them is trained on.
    """
    if not any(reward.weight for reward in scope.rewards):
        raise ValueError(
            f"{scope.source_key}: every weight is 0, so that nothing is trained on; give one of"
            " them another weight"
        )
    unscored = prompt_sets_without_reward(scope.rewards, scope.prompt_sets)
    if unscored:
        raise ValueError(
            f"{scope.key}: none of them scores the prompt set {unscored[0]}; add it to the"
            " 'prompts' of one"
        )


def check_held_out_prompts_are_scored(
    prompts: PromptsConfig, rewards: Sequence[RewardConfig]
) -> None:
    """Check that a reward scores the prompts of ``prompts.held_out_source``.

    Raises:
        ValueError: all rewards name prompt sets, and this file is in none of them.
    """
    # Its prompts carry the name of the file instead of a set of the mixture, so that only rewards
    # for all prompts score them.
    if prompts.held_out_source and all(reward.prompts for reward in select_trained(rewards)):
        raise ValueError(
            "rewards: each names prompt sets, and prompts.held_out_source is none; leave"
            " 'prompts' of one out"
        )


def check_evaluated_rewards(
    scopes: Iterable[RewardScope], guardrails: Sequence[RewardConfig]
) -> None:
    """Check that an evaluation, which scores single images, has a reward for each prompt set.

    Custom rewards pass: whether one compares images is known only once its code is imported, and
    reading a recipe imports no rewards.

    Raises:
        ValueError: a scope or a prompt set has only rewards that compare images, or a guardrail
            compares images.
    """
    for scope in scopes:
        evaluated = [
            reward
            for reward in select_trained(scope.rewards)
            if isinstance(reward, CustomRewardConfig) or not reward.compares
        ]
        if not evaluated or prompt_sets_without_reward(evaluated, scope.prompt_sets):
            raise ValueError(ONLY_COMPARISONS.format(scope.source_key))
    for guardrail in guardrails:
        if not isinstance(guardrail, CustomRewardConfig) and guardrail.compares:
            raise ValueError(GUARDRAIL_COMPARES.format(guardrail.column))


def check_rewards_suit_model(rewards: Sequence[RewardConfig], model: ModelConfig) -> None:
    """Check that rewards can score what the model generates.

    Raises:
        ValueError: a reward cannot read the alphabet, or scores videos where images are generated.
    """
    if "lower_case" in model.training.alphabets and any(
        config.name == "recognizer" for config in rewards
    ):
        raise ValueError(
            "recognizer reads capitals alone, and model.training.alphabets has lower_case; take"
            " ocr, case: kept"
        )
    family = find_family(model.family)
    # A family without sound that is the user's own without a record fails when it is scored.
    if family is not None and "sound" not in family.latents:
        with_sound = [name for name, one in FAMILIES.items() if "sound" in one.latents]
        for config in rewards:
            if not isinstance(config, CustomRewardConfig) and config.scores == "sounds":
                raise ValueError(
                    f"{config.column} scores sound, and model.family = {model.family!r} generates"
                    f" none; take {', '.join(with_sound)}, or leave {config.column} out"
                )
    # What a custom reward scores is not known before its code is imported: such a reward fails
    # when it gets images.
    video_rewards = [
        config.column
        for config in rewards
        if not isinstance(config, CustomRewardConfig) and config.scores in ("videos", "sounds")
    ]
    if model.frames == 1 and video_rewards:
        raise ValueError(
            f"{video_rewards[0]} scores videos, and model.frames = 1 draws images; raise it, or"
            f" leave {video_rewards[0]} out"
        )


def check_guardrail_tolerances(
    tolerance: GuardrailToleranceConfig, guardrails: Sequence[RewardConfig]
) -> None:
    """Check that tolerances are of guardrails that exist.

    Raises:
        RecipeError: one is not; names the nearest guardrail.
    """
    # A tolerance under a misspelt name would never be looked up: the default would apply in its
    # place, and nothing would say so.
    names = [guardrail.column for guardrail in guardrails]
    for unit in ("standard_deviations", "absolute"):
        for name in getattr(tolerance, unit):
            if name in names:
                continue
            nearest = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            key = format_path(("promotion", "guardrail_tolerance", unit, name))
            raise RecipeError(
                f"{key}: no such guardrail; {hint}It has {', '.join(names) or 'none'}"
            )
