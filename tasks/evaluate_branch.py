"""Evaluate a policy of a branch on the branch's own prompts, by its own rewards."""

from __future__ import annotations

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact_once, make_node_output
from tasks.generating_group import join_generating_group, open_node_run_once
from tasks.resources import generating_resources
from tasks.types import BaseModelArtifact, EvaluatedPolicy, TrainedPolicy


@task(cache=ONCE_PER_RUN, **generating_resources())
def evaluate_branch(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    policy: TrainedPolicy,
    prompts: FlyteFile,
    branch: str,
    label: str,
) -> EvaluatedPolicy:
    """Evaluate the policy. The run's own curves leave the result out: it is of other prompts than
    theirs.
    """
    from ebbflow.evaluation.evaluate import evaluate_folder
    from ebbflow.tracking.nodes import log_evaluation
    from ebbflow.training.rounds import call_on_first

    node = f"{label} evaluation"
    branch_recipe = recipe.select_branch(branch)  # with the branch's rewards and guardrails
    with join_generating_group(recipe), open_node_run_once(run, node) as run_logger:
        samples = call_on_first(lambda: make_node_output(run, node, "samples.parquet"))
        evaluation = evaluate_folder(
            branch_recipe,
            fetch_artifact_once(base.folder),
            fetch_artifact_once(policy.folder),
            fetch_artifact_once(prompts),
            label,
            samples,
        )
        if run_logger:
            log_evaluation(run_logger, evaluation, samples)
    return EvaluatedPolicy(policy=policy, evaluation=evaluation, samples=FlyteFile(str(samples)))
