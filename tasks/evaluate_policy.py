"""Evaluate a policy on the validation and held-out prompts with fixed noise."""

from __future__ import annotations

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact, make_node_output
from tasks.resources import accelerated_resources
from tasks.types import BaseModelArtifact, EvaluatedPolicy, TrainedPolicy


@task(cache=ONCE_PER_RUN, **accelerated_resources())
def evaluate_policy(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    policy: TrainedPolicy,
    prompts: FlyteFile,
    label: str,
) -> EvaluatedPolicy:
    """Evaluate the policy; means, samples and an image grid go to MLflow."""
    from ebbflow.evaluation.evaluate import evaluate_folder
    from ebbflow.tracking.child_run import open_node_run
    from ebbflow.tracking.nodes import log_evaluation

    node = f"{label} evaluation"
    samples = make_node_output(run, node, "samples.parquet")
    with open_node_run(run, node) as run_logger:
        evaluation = evaluate_folder(
            recipe,
            fetch_artifact(base.folder),
            fetch_artifact(policy.folder),
            fetch_artifact(prompts),
            label,
            samples,
            run.look,
        )
        log_evaluation(run_logger, evaluation, samples, policy.global_step)
    return EvaluatedPolicy(policy=policy, evaluation=evaluation, samples=FlyteFile(str(samples)))
