"""``distill_branches`` with ``placement: colocated``: the same loop on every process of a group."""

from __future__ import annotations

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.branches import add_branch_stages, locate_teachers
from tasks.cache import ONCE_PER_RUN
from tasks.resources import training_group_resources
from tasks.train_online_colocated import train_stage_in_group
from tasks.types import BaseModelArtifact, SpecialistPolicy, TrainedPolicy


@task(cache=ONCE_PER_RUN, **training_group_resources())
def distill_branches_colocated(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    policy: TrainedPolicy,
    prompts: FlyteFile,
    round: int,
    stage: int,
    specialists: list[SpecialistPolicy],
) -> TrainedPolicy:
    """Train the stage; return its policy folder. Every rank runs this body; only what rank 0 writes
    and returns counts.
    """
    from ebbflow.stage import StageContext

    ctx = StageContext(recipe, round, stage)
    trained = train_stage_in_group(
        ctx, run, base, policy, prompts, locate_teachers(ctx, specialists)
    )
    return add_branch_stages(trained, specialists)
