"""An online stage: one task that keeps the models hot and repeats rollout, score, advantages, update."""

from __future__ import annotations

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.recipe import Recipe
from ebbflow.records import TrackedRun
from tasks.files import fetch, scratch
from tasks.resources import accelerated
from tasks.types import BaseModelArtifact, TrainedPolicy


@task(**accelerated())
def train_online(
    recipe: Recipe, run: TrackedRun, base: BaseModelArtifact, policy: TrainedPolicy, prompts: FlyteFile, round: int, stage: int
) -> TrainedPolicy:
    """The policy folder after the stage."""
    from ebbflow.online.loop import train_online_folder
    from ebbflow.stage import Kept, Place
    from ebbflow.tracking.nodes import log_stage
    from ebbflow.tracking.runs import node_run

    place, trained, metrics = Place(recipe, round, stage), scratch("policy"), scratch("metrics.json")
    with node_run(run, place.label) as node:
        kept = Kept(node.log_metrics)
        teacher = fetch(FlyteDirectory(place.teacher)) if place.teacher else None
        record = train_online_folder(place, fetch(base.folder), fetch(policy.folder), fetch(prompts), trained, kept, teacher)
        log_stage(node, record)
    kept.write(metrics)
    return TrainedPolicy(folder=FlyteDirectory(str(trained)), record=record, metrics=FlyteFile(str(metrics)))
