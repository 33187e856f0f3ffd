"""Branches of a round: specialists that are trained side by side, each on prompts and rewards of
its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ebbflow.recipe.base import Strict
from ebbflow.recipe.registry import AnyRewardConfig

if TYPE_CHECKING:
    from ebbflow.recipe.stages import StageConfig

BRANCH = "branch:"
"""Prefix of a teacher that is the policy of a branch and not a folder: ``branch:letters``."""


class BranchConfig(Strict):
    """A branch: its stages train a specialist from the policy before them, with prompts and rewards
    of the branch."""

    prompts: list[str] = []
    """Names of sets of ``prompts.mixture``. Default: all prompts."""
    rewards: list[AnyRewardConfig] = []
    """Rewards that the branch's stages train on and that evaluate its policies. Default:
    ``rewards``."""


def branches_teaching(stage: StageConfig) -> list[str]:
    """Return the branches whose policies are teachers of a stage, in the order in which it names
    them.
    """
    hyper = stage.hyper_parameters
    # Read by the fields' names, which an algorithm of the user's own may have as well.
    teachers = [getattr(hyper, "teacher", None), *getattr(hyper, "teachers", {}).values()]
    names = [
        teacher.removeprefix(BRANCH)
        for teacher in teachers
        if teacher and teacher.startswith(BRANCH)
    ]
    # One branch can teach several prompt sets; a dict keeps the order, which a set would not.
    return list(dict.fromkeys(names))


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


def check_branches(
    branches: Mapping[str, BranchConfig],
    stages: Sequence[StageConfig],
    prompt_sets: Sequence[str],
) -> None:
    """Check that branches begin together, and that a later stage learns from each of them.

    Args:
        prompt_sets: names of the sets of ``prompts.mixture``.

    Raises:
        ValueError: they do not; names the stage and the fix.
    """
    for name, branch in branches.items():
        unknown = [label for label in branch.prompts if label not in prompt_sets]
        if unknown:
            raise ValueError(
                f"branches.{name}.prompts: prompts.mixture has no set {unknown[0]!r}, only"
                f" {', '.join(prompt_sets) or 'no sets'}"
            )
    for index, stage in enumerate(stages):
        _check_branch_of_stage(index, stage, stages[:index], list(branches))
    for name in branches:
        _check_stages_of_branch(name, stages)


def _check_branch_of_stage(
    index: int, stage: StageConfig, earlier_stages: Sequence[StageConfig], branches: list[str]
) -> None:
    key = f"stages.{index}"
    if stage.branch and stage.branch not in branches:
        raise ValueError(
            f"{key}.branch = {stage.branch!r}: no such branch; 'branches' has"
            f" {', '.join(branches) or 'none'}"
        )
    if stage.branch and stage.source_files:
        raise ValueError(
            f"{key} trains on pairs or data, whose prompts are of no branch; take branch:"
            f" {stage.branch} out of it"
        )
    if stage.anchor and branches_teaching(stage):
        raise ValueError(f"{key} learns from branches, and its tasks take no anchor; leave it out")
    for name in branches_teaching(stage):
        # Branches run side by side, so none of them can wait for the policy of another.
        if stage.branch:
            raise ValueError(
                f"{key} is in a branch and cannot learn from {BRANCH}{name}; take a policy"
                " folder or its URI"
            )
        if name not in [earlier.branch for earlier in earlier_stages]:
            raise ValueError(
                f"{key} learns from {BRANCH}{name}, of which no stage before it is; give stages"
                f" branch: {name}"
            )


def _check_stages_of_branch(name: str, stages: Sequence[StageConfig]) -> None:
    indices = [index for index, stage in enumerate(stages) if stage.branch == name]
    if not indices:
        raise ValueError(f"branches.{name} has no stage; give stages branch: {name}")
    # All branches start from one policy. A stage of the trunk in the middle of a branch would
    # change that policy for some of them.
    between = [index for index in range(indices[0], indices[-1]) if not stages[index].branch]
    if between:
        raise ValueError(
            f"stages.{between[0]} is between stages of branches.{name} and in no branch; move it"
        )
    # The policy of a branch reaches the rest of the run as a teacher only: a branch without a stage
    # that learns from it would change nothing.
    if not any(name in branches_teaching(stage) for stage in stages):
        raise ValueError(
            f"nothing learns from branches.{name}; name {BRANCH}{name} among the teachers of a"
            " distillation after its stages"
        )
