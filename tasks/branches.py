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
    """Where the policy folders of a stage's teachers lie, by the policy copy that each becomes."""
    folders = {f"{BRANCH}{one.branch}": one.policy.folder for one in specialists}
    found = {text: str(folder.remote_source or folder.path) for text, folder in folders.items()}
    return {copy: found.get(text, text) for copy, text in ctx.teacher_folders.items()}


def first_logged_step(ctx: StageContext, policy: TrainedPolicy) -> int | None:
    """The step at which a stage's curves begin in the run's; None in a branch, as others run at the
    same time.
    """
    return None if ctx.config.branch else policy.global_step


def add_branch_stages(
    trained: TrainedPolicy, specialists: Sequence[SpecialistPolicy]
) -> TrainedPolicy:
    """The policy with the stages of branches, and an alarm for each whose gate refused its policy:
    the report shows them.
    """
    from ebbflow.evaluation.gate import REFUSED

    assert trained.record is not None
    alarms = [
        f"branch {one.branch} teaches with the policy that it began with. "
        f"{next(reason for reason in one.decision.reasons if reason.startswith(REFUSED))}"
        for one in specialists
        if not one.decision.promote
    ]
    record = trained.record.model_copy(update={"alarms": [*trained.record.alarms, *alarms]})
    stages = [stage for one in specialists for stage in one.stages]
    return trained.model_copy(update={"record": record, "branch_stages": stages})
