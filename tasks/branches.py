"""What a stage takes over from branches: their policies as teachers, what their stages did, and
what their gates said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ebbflow.recipe.branches import BRANCH
from tasks.types import SpecialistPolicy, TrainedPolicy

if TYPE_CHECKING:
    from ebbflow.stage import StageContext


def locate_teachers(ctx: StageContext, specialists: Sequence[SpecialistPolicy]) -> dict[str, str]:
    """Locate the policy folders of a stage's teachers, by the policy copy that each becomes.

    Example:
        A recipe whose teachers are "branch:ocr" and "s3://policies/style" gives the URI of the
        folder of the branch ``ocr`` for the first, and the second as it is.
    """
    uris = {}
    for specialist in specialists:
        folder = specialist.policy.folder
        # The remote source: the path is of this pod, or of a download that has not begun.
        uris[f"{BRANCH}{specialist.branch}"] = str(folder.remote_source or folder.path)
    return {copy: uris.get(text, text) for copy, text in ctx.teacher_folders.items()}


def first_logged_step(ctx: StageContext, policy: TrainedPolicy) -> int | None:
    """Return the step at which a stage's curves begin in the run's; None in a branch, as others run
    at the same time.
    """
    return None if ctx.config.branch else policy.global_step


def add_branch_stages(
    trained: TrainedPolicy, specialists: Sequence[SpecialistPolicy]
) -> TrainedPolicy:
    """Return the policy with the stages of branches, and an alarm for each whose gate refused its
    policy: the report shows them.
    """
    from ebbflow.evaluation.gate import REFUSED

    assert trained.record is not None  # None for the base model, which no stage trained
    alarms = []
    for specialist in specialists:
        if specialist.decision.promote:
            continue
        # A refused branch has at least one reason that begins so; the first is enough here.
        reasons = specialist.decision.reasons
        refusal = next(reason for reason in reasons if reason.startswith(REFUSED))
        alarms.append(
            f"branch {specialist.branch} teaches with the policy that it began with. {refusal}"
        )
    record = trained.record.model_copy(update={"alarms": [*trained.record.alarms, *alarms]})
    stages = [stage for specialist in specialists for stage in specialist.stages]
    return trained.model_copy(update={"record": record, "branch_stages": stages})
