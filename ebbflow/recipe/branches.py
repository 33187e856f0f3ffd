"""Branches of a round: specialists that are trained side by side, each on prompts and rewards of
its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ebbflow.recipe.base import Strict
from ebbflow.recipe.registry import AnyRewardConfig

if TYPE_CHECKING:
    from ebbflow.recipe.stages import StageConfig

BRANCH = "branch:"
"""Prefix of a teacher that is the policy of a branch and not a folder: ``branch:letters``."""


class BranchConfig(Strict):
    """A branch: the stages that name it train a specialist from the policy before them, on prompts
    and rewards of its own.
    """

    prompts: list[str] = []
    """Names of sets of ``prompts.mixture``. Default: all prompts."""
    rewards: list[AnyRewardConfig] = []
    """Rewards that its stages train on and that evaluate its policies. Default: ``rewards``."""


def branches_teaching(stage: StageConfig) -> list[str]:
    """The branches whose policies are teachers of a stage, in the order in which it names them."""
    hyper = stage.hyper_parameters
    named = [getattr(hyper, "teacher", None), *getattr(hyper, "teachers", {}).values()]
    return list(
        dict.fromkeys(
            text.removeprefix(BRANCH) for text in named if text and text.startswith(BRANCH)
        )
    )


def find_stages_in_parallel(stages: Sequence[StageConfig], index: int) -> list[int]:
    """Find the stages of a round that may run while the stage ``index`` does.

    For a stage of a branch: those of other branches, and those after it in none. For any other:
    those of branches that neither it nor a stage before it learns from.
    """
    branch = stages[index].branch
    if branch:
        return [
            other
            for other, stage in enumerate(stages)
            if (stage.branch or other > index) and stage.branch != branch
        ]
    # A stage that learns from a branch starts after the branch has ended.
    ended = {name for stage in stages[: index + 1] for name in branches_teaching(stage)}
    return [
        other
        for other, stage in enumerate(stages[:index])
        if stage.branch and stage.branch not in ended
    ]


def check_branches(branches: Iterable[str], stages: Sequence[StageConfig]) -> None:
    """Check that branches begin together, and that a later stage learns from each of them.

    Raises:
        ValueError: they do not; names the stage and the fix.
    """
    known = list(branches)
    for index, stage in enumerate(stages):
        key = f"stages.{index}"
        if stage.branch and stage.branch not in known:
            raise ValueError(
                f"{key}.branch = {stage.branch!r}: no such branch; 'branches' has"
                f" {', '.join(known) or 'none'}"
            )
        if stage.branch and getattr(stage, "pairs", None):
            raise ValueError(
                f"{key} trains on pairs, whose prompts are of no branch; take branch:"
                f" {stage.branch} out of it"
            )
        for name in branches_teaching(stage):
            if stage.branch:
                raise ValueError(
                    f"{key} is in a branch and cannot learn from {BRANCH}{name}; take a policy"
                    " folder or its URI"
                )
            if name not in [earlier.branch for earlier in stages[:index]]:
                raise ValueError(
                    f"{key} learns from {BRANCH}{name}, of which no stage before it is; give stages"
                    f" branch: {name}"
                )
    for name in known:
        own = [index for index, stage in enumerate(stages) if stage.branch == name]
        if not own:
            raise ValueError(f"branches.{name} has no stage; give stages branch: {name}")
        if between := [index for index in range(own[0], own[-1]) if not stages[index].branch]:
            raise ValueError(
                f"stages.{between[0]} is between stages of branches.{name} and in no branch;"
                " move it"
            )
        if not any(name in branches_teaching(stage) for stage in stages):
            raise ValueError(
                f"nothing learns from branches.{name}; name {BRANCH}{name} among the teachers of a"
                " distillation after its stages"
            )
