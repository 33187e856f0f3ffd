"""Train an online stage whose teachers are the policies of branches."""

from __future__ import annotations

from pathlib import Path

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.branches import add_branch_stages, locate_teachers
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact, fetch_folder
from tasks.resources import accelerated_resources
from tasks.train_online import train_stage
from tasks.types import BaseModelArtifact, SpecialistPolicy, TrainedPolicy


@task(cache=ONCE_PER_RUN, **accelerated_resources())
def distill_branches(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    policy: TrainedPolicy,
    prompts: FlyteFile,
    round: int,
    stage: int,
    specialists: list[SpecialistPolicy],
) -> TrainedPolicy:
    """Train the stage; return its policy folder."""
    from ebbflow.stage import StageContext

    ctx = StageContext(recipe, round, stage)
    teachers: dict[str, Path] = {
        copy: fetch_folder(uri) for copy, uri in locate_teachers(ctx, specialists).items()
    }
    trained = train_stage(ctx, run, fetch_artifact(base.folder), policy, prompts, teachers)
    return add_branch_stages(trained, specialists)
