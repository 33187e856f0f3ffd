"""Train an online stage: one task that keeps the models loaded and repeats rollout, scoring,
advantages and update.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.branches import first_logged_step
from tasks.cache import ONCE_PER_RUN
from tasks.files import (
    fetch_anchor,
    fetch_artifact,
    fetch_folder,
    make_node_output,
    open_checkpoints,
)
from tasks.preemption import retry_on_errors
from tasks.resources import DEPLOYMENT, accelerated_resources
from tasks.types import BaseModelArtifact, TrainedPolicy

if TYPE_CHECKING:
    from ebbflow.online.ray_actor import ActorFolders
    from ebbflow.stage import AnchorFiles, StageContext


@task(cache=ONCE_PER_RUN, **accelerated_resources())
def train_online(
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
    """Train the stage; return its policy folder."""
    from ebbflow.stage import StageContext

    ctx = StageContext(recipe, round, stage)
    teachers = {copy: fetch_folder(uri) for copy, uri in ctx.teacher_folders.items()}
    anchor = fetch_anchor(anchor_tables, anchor_latents)
    return train_stage(
        ctx, run, fetch_artifact(base.folder), policy, prompts, teachers, anchor=anchor
    )


def train_stage(
    ctx: StageContext,
    run: TrackedRun,
    base: Path,
    policy: TrainedPolicy,
    prompts: FlyteFile,
    teachers: Mapping[str, Path] | None = None,
    actors: ActorFolders | None = None,
    anchor: AnchorFiles | None = None,
) -> TrainedPolicy:
    """Run the stage and log it as a node. With ``actors``, ``base`` and ``teachers`` are not read:
    actors fetch their own.
    """
    from ebbflow.online.train_folder import train_online_folder
    from ebbflow.stage import MetricsRecorder, StageFolders
    from ebbflow.tracking.child_run import open_node_run
    from ebbflow.tracking.nodes import log_stage
    from ebbflow.training.stop_conditions import Preempted

    trained = make_node_output(run, ctx.stage_label, "policy")
    metrics = make_node_output(run, ctx.stage_label, "metrics.json")
    with (
        retry_on_errors(Preempted),
        open_node_run(run, ctx.stage_label, first_logged_step(ctx, policy)) as run_logger,
    ):
        recorder = MetricsRecorder(run_logger)
        checkpoints = open_checkpoints(run, ctx)
        start = fetch_artifact(policy.folder)
        folders = StageFolders(
            base, start, fetch_artifact(prompts), trained, teachers or {}, anchor
        )
        record = train_online_folder(
            ctx,
            folders,
            recorder,
            actors,
            checkpoints,
            # A stage in one process has nobody to share the tokens of a sample with.
            context_parallel=DEPLOYMENT.train_context_parallel if actors else 1,
        )
        log_stage(run_logger, record)
    recorder.write_json(metrics)
    return TrainedPolicy.from_stage(policy, trained, metrics, record, record.steps)
