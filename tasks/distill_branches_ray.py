"""``distill_branches`` with ``placement: ray``: training, rollouts and rewards on a Ray cluster."""

from __future__ import annotations

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.branches import add_branch_stages, locate_teachers
from tasks.cache import ONCE_PER_RUN
from tasks.resources import ray_cluster_resources
from tasks.train_online_ray import train_stage_on_ray
from tasks.types import BaseModelArtifact, SpecialistPolicy, TrainedPolicy


@task(cache=ONCE_PER_RUN, **ray_cluster_resources())
def distill_branches_ray(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    policy: TrainedPolicy,
    prompts: FlyteFile,
    round: int,
    stage: int,
    specialists: list[SpecialistPolicy],
) -> TrainedPolicy:
    """Train the stage; return its policy folder. Actors fetch what they load."""
    from ebbflow.stage import StageContext

    ctx = StageContext(recipe, round, stage)
    trained = train_stage_on_ray(ctx, run, base, policy, prompts, locate_teachers(ctx, specialists))
    return add_branch_stages(trained, specialists)
