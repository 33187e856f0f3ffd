"""Train an online stage with ``placement: colocated``: the same loop on every process of a group,
on one node or several.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_anchor, fetch_artifact_once, fetch_once_per_machine, open_checkpoints
from tasks.resources import DEPLOYMENT, count_replicas, training_group_resources
from tasks.training_group import join_training_group
from tasks.types import BaseModelArtifact, TrainedPolicy

if TYPE_CHECKING:
    from ebbflow.stage import StageContext


@task(cache=ONCE_PER_RUN, **training_group_resources())
def train_online_colocated(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    policy: TrainedPolicy,
    prompts: FlyteFile,
    round: int,
    stage: int,
    anchor_tables: list[FlyteFile] | None = None,
    anchor_latents: list[FlyteFile] | None = None,
) -> TrainedPolicy:
    """Train the stage; return its policy folder. Every rank runs this body; only what rank 0 writes
    and returns counts.
    """
    from ebbflow.stage import StageContext

    ctx = StageContext(recipe, round, stage)
    anchor = (anchor_tables, anchor_latents)
    return train_stage_in_group(ctx, run, base, policy, prompts, ctx.teacher_folders, anchor)


def train_stage_in_group(
    ctx: StageContext,
    run: TrackedRun,
    base: BaseModelArtifact,
    policy: TrainedPolicy,
    prompts: FlyteFile,
    teachers: Mapping[str, str],
    anchor: tuple[list[FlyteFile] | None, list[FlyteFile] | None] = (None, None),
) -> TrainedPolicy:
    """Run the stage as one rank of its group; when another node is gone, the task is retried.

    Args:
        teachers: URIs of their policy folders, by the copy that each becomes.
        anchor: tables and latents of the stage's anchor.
    """
    from ebbflow.online.train_folder import train_online_folder
    from ebbflow.stage import StageFolders

    # Samples wait in main memory, and travel from there to other ranks.
    with join_training_group(ctx, run, policy, main_memory=True) as member:
        ranks = member.ranks
        folders = StageFolders(
            fetch_artifact_once(base.folder),
            fetch_artifact_once(policy.folder),
            fetch_artifact_once(prompts),
            member.policy_folder,
            {copy: fetch_once_per_machine(uri) for copy, uri in teachers.items()},
            fetch_anchor(*anchor),
        )
        checkpoints = open_checkpoints(run, ctx, ranks.rank, ranks.local_rank)
        starting = member.wait_for_inputs()
        record = train_online_folder(
            ctx,
            folders,
            member.recorder,
            checkpoints=checkpoints,
            replicas=count_replicas(ranks),
            context_parallel=DEPLOYMENT.train_context_parallel,
        )
        return member.finish_stage(policy, record, starting)
