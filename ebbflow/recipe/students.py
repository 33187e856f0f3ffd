"""Checks of stages that learn from a teacher: a student of few steps (``dmd2``, ``tdm``), or
distillation with one teacher for each prompt set.
"""

from __future__ import annotations

from collections.abc import Sequence

from ebbflow.recipe.branches import branches_teaching
from ebbflow.recipe.families import find_family
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.stages import StageConfig


def teacher_copy_name(prompt_set: str) -> str:
    """Return the policy copy that is the teacher of a prompt set; the teacher of all prompts is the
    copy ``teacher``.
    """
    return f"teacher:{prompt_set}"


def check_teachers_of_prompt_sets(
    index: int, stage: StageConfig, prompt_sets: Sequence[str]
) -> None:
    """Check that ``algorithm.teachers`` names each prompt set of a stage, and no other.

    Raises:
        ValueError: it does not; names the key and the sets.
    """
    teachers = getattr(stage.hyper_parameters, "teachers", {})
    if not teachers:
        return
    setting = f"stages.{index}.algorithm.teachers = {', '.join(teachers)}"
    unknown = sorted(teachers.keys() - set(prompt_sets))
    if unknown:
        raise ValueError(
            f"{setting}: prompts.mixture has no set {unknown[0]!r}, only"
            f" {', '.join(prompt_sets) or 'no sets'}; name the sets"
        )
    without_teacher = [name for name in prompt_sets if name not in teachers]
    if without_teacher:
        raise ValueError(
            f"{setting}: the prompt set {without_teacher[0]} has no teacher; name one for every set"
            " of prompts.mixture"
        )


def check_students_have_teacher(stages: Sequence[StageConfig], rounds: int) -> None:
    """Check that no student of few steps is the teacher of another student.

    Distribution matching takes the teacher's velocity for a score, and the velocity of a student
    of few steps is none.

    Raises:
        ValueError: a student would be the teacher; names the stage and the fix.
    """
    for index, stage in enumerate(stages):
        key = f"stages.{index}.algorithm"
        teaching_branches = branches_teaching(stage)
        teacher = getattr(stage.hyper_parameters, "teacher", None)
        # A teacher that is a policy folder is not checked here: it comes from another run.
        if not stage.algorithm_kind.trains_student or (teacher and not teaching_branches):
            continue
        if teaching_branches:
            # The teacher is the policy that the last stage of its branch leaves.
            branch: str | None = teaching_branches[0]
            end = 1 + max(number for number in range(index) if stages[number].branch == branch)
            policy = f"{key}.teacher = {teacher!r} is"
        else:
            branch = stage.branch
            end = index
            policy = (
                f"{key} has no teacher, so that it learns from the policy before it, and that is"
            )
        students = _list_earlier_student_stages(stages, rounds, end, branch)
        if students:
            since = f"since stages.{students[0]}" if students[0] < end else "in round 2"
            raise ValueError(
                f"{policy} a student of few steps {since}; give teacher a policy folder"
            )


def _list_earlier_student_stages(
    stages: Sequence[StageConfig], rounds: int, end: int, branch: str | None
) -> list[int]:
    """Return the stages that have made the policy of a branch (or of none) a student of few steps
    when the stage with the index ``end`` begins.
    """
    return [
        index
        for index, stage in enumerate(stages)
        if stage.algorithm_kind.trains_student
        and stage.branch in (None, branch)
        # From the second round on, stages outside of branches precede every stage; a branch
        # begins each round anew.
        and (index < end or (rounds > 1 and stage.branch is None))
    ]


def check_students_are_trainable(stages: Sequence[StageConfig], model: ModelConfig) -> None:
    """Check that the model suits the students of few steps that stages train.

    Raises:
        ValueError: its guidance or its precision does not; names the stage and the fix.
    """
    family = find_family(model.family)
    for index, stage in enumerate(stages):
        kind = stage.algorithm_kind
        if not kind.trains_student:
            continue
        # ``family is None``: an adapter of the user's own, which may have guidance.
        if model.guidance > 1 and (family is None or family.guided):
            raise ValueError(
                f"stages.{index}: a student of {stage.algorithm_name} generates without"
                f" guidance, and model.guidance = {model.guidance:g}; set it to 1, and"
                " algorithm.guidance to that of the teacher"
            )
        if kind.guides_teacher(stage.hyper_parameters) and family and not family.guided:
            guidance = getattr(stage.hyper_parameters, "largest_guidance", 1.0)
            raise ValueError(
                f"stages.{index}.algorithm: a guidance of {guidance:g} needs classifier-free"
                f" guidance, which model.family = {model.family!r} has not; leave it out"
            )
        if model.precision == "float16":
            raise ValueError(
                f"stages.{index}: the fake score of {stage.algorithm_name} has no float16; take"
                " bfloat16"
            )
