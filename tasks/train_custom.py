"""A stage of a kind of the user's own."""

from __future__ import annotations

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.branches import first_logged_step
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact, make_node_output
from tasks.resources import accelerated_resources
from tasks.types import BaseModelArtifact, TrainedPolicy


@task(cache=ONCE_PER_RUN, **accelerated_resources())
def train_custom(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    policy: TrainedPolicy,
    prompts: FlyteFile,
    round: int,
    stage: int,
) -> TrainedPolicy:
    """Run the stage; return its policy folder."""
    from ebbflow.compute import require_requested_gpus
    from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
    from ebbflow.tracking.child_run import open_node_run
    from ebbflow.tracking.nodes import log_stage
    from ebbflow.training.custom_stage import train_custom_folder

    require_requested_gpus()
    ctx = StageContext(recipe, round, stage)
    trained = make_node_output(run, ctx.stage_label, "policy")
    metrics = make_node_output(run, ctx.stage_label, "metrics.json")
    with open_node_run(run, ctx.stage_label, first_logged_step(ctx, policy)) as run_logger:
        recorder = MetricsRecorder(run_logger)
        folders = StageFolders(
            fetch_artifact(base.folder),
            fetch_artifact(policy.folder),
            fetch_artifact(prompts),
            trained,
        )
        record = train_custom_folder(ctx, folders, recorder)
        log_stage(run_logger, record)
    recorder.write_json(metrics)
    # A stage that reports no number of steps has as many as it recorded metrics.
    steps = record.steps or len(recorder.metrics_rows)
    return TrainedPolicy.from_stage(policy, trained, metrics, record, steps)
