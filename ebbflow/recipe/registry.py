"""What a recipe can name: the algorithms and rewards in their folders, and a user's own.

A file in ``ebbflow/algorithms/built_in`` or ``ebbflow/rewards/built_in`` defines a class of
hyper-parameters or options, and is found here by its ``name``: a new one is one file, and no list
of names has to follow. Those files import their base classes from this room, the lowest one; it
imports them by the names of their folders, as it imports a user's own by its path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import BeforeValidator, Field, TypeAdapter

from ebbflow.recipe.algorithms import AlgorithmConfig, CustomAlgorithmConfig
from ebbflow.recipe.base import suggest_name
from ebbflow.recipe.plugins import PATH, list_built_in_classes
from ebbflow.recipe.rewards import CustomRewardConfig, RewardConfig

ALGORITHMS = {
    config.model_fields["name"].default: config
    for config in list_built_in_classes("ebbflow.algorithms.built_in", AlgorithmConfig)
}
"""The class of hyper-parameters of each algorithm, by the name that ``algorithm.name`` takes."""

REWARDS = {
    config.model_fields["name"].default: config
    for config in list_built_in_classes("ebbflow.rewards.built_in", RewardConfig)  # type: ignore[type-abstract]
}
"""The class of options of each reward, by its name."""


def _expand_reward_name(reward: Any) -> Any:
    """Expand the short forms of a reward.

    Example:
        ``rewards: [ocr, "mine.contrast:Contrast"]`` is short for ``{name: ocr}`` and
        ``{name: custom, path: "mine.contrast:Contrast"}``.
    """
    if isinstance(reward, str):
        reward = {"name": reward}
    if not isinstance(reward, dict):
        return reward
    name = reward.get("name")
    # Anything else than a name is left to pydantic, whose error says what is wrong with it.
    if not isinstance(name, str):
        return reward
    # ``weight``, ``label`` and the other keys of every reward stay beside the path.
    if PATH.fullmatch(name):
        return {**reward, "name": "custom", "path": name}
    if name not in (*REWARDS, "custom"):
        raise ValueError(
            f"{suggest_name(name, REWARDS)}Take {', '.join(REWARDS)}, or give package.module:name"
            " of your own"
        )
    return reward


# mypy cannot read a union that is built from files. To it, an algorithm is one class with a name.
if TYPE_CHECKING:

    class _NamedAlgorithm(AlgorithmConfig):
        name: str

    AnyAlgorithmConfig = _NamedAlgorithm | CustomAlgorithmConfig
    AnyRewardConfig = RewardConfig
else:
    AnyAlgorithmConfig = Annotated[
        Union[(*ALGORITHMS.values(), CustomAlgorithmConfig)], Field(discriminator="name")
    ]
    AnyRewardConfig = Annotated[
        Annotated[Union[(*REWARDS.values(), CustomRewardConfig)], Field(discriminator="name")],
        BeforeValidator(_expand_reward_name),
    ]


def default_algorithm(name: str) -> AnyAlgorithmConfig:
    """Return an algorithm with its default hyper-parameters."""
    return TypeAdapter(AnyAlgorithmConfig).validate_python({"name": name})


def configure_reward(name: str, **keys: Any) -> RewardConfig:
    """Return a reward by its name (or a custom one by its path), with the keys that a recipe would
    give it.

    Raises:
        ValidationError: there is no such reward or key.
    """
    return TypeAdapter(AnyRewardConfig).validate_python({"name": name, **keys})
