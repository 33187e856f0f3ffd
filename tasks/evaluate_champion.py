"""Evaluate the registered champion and the anchor on this run's prompts, so that the gate compares
like with like.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.data.records import Champion, Evaluation, TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact_once, make_node_output
from tasks.generating_group import join_generating_group, open_node_run_once
from tasks.resources import generating_resources
from tasks.types import (
    AnchorPolicy,
    BaseModelArtifact,
    ChampionPolicy,
    EvaluatedPolicy,
    TrainedPolicy,
)


@task(cache=ONCE_PER_RUN, **generating_resources())
def evaluate_champion(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    prompts: FlyteFile,
    before: EvaluatedPolicy,
) -> ChampionPolicy:
    """Evaluate the champion, or return ``before``, the evaluation of the run's own start, if there
    is no champion yet; and the anchor, unless that is the champion.
    """
    with join_generating_group(recipe):
        return _evaluate_both(recipe, run, base, prompts, before)


def _evaluate_both(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    prompts: FlyteFile,
    before: EvaluatedPolicy,
) -> ChampionPolicy:
    """Evaluate champion and anchor as one rank of the group."""
    from ebbflow.registry.lookup import find_anchor, find_champion
    from ebbflow.training.rounds import call_on_first

    model_name = recipe.promotion.model_name
    # All ranks evaluate the version that one of them has read: it may change meanwhile.
    champion = call_on_first(lambda: find_champion(run.tracking_uri, model_name))
    if champion is None:
        return ChampionPolicy(version=None, evaluated=before)
    call_on_first(lambda: _warn_of_trained_prompts(recipe, run, prompts))
    label = f"champion v{champion.version}"
    evaluated = _evaluate_version(recipe, run, base, prompts, champion, label)
    anchor = None
    version = call_on_first(lambda: find_anchor(run.tracking_uri, model_name))
    if recipe.promotion.anchor_tolerance is None:
        pass
    elif version is None:
        anchor = _find_base_anchor(recipe, run, base, prompts, before)
    elif version.version != champion.version:
        anchor = AnchorPolicy(
            label=f"version {version.version}, which a person chose",
            evaluated=_evaluate_version(
                recipe, run, base, prompts, version, f"anchor v{version.version}"
            ),
        )
    return ChampionPolicy(
        version=champion.version,
        evaluated=evaluated,
        anchor=anchor,
        promoted_reward=champion.promoted_reward,
    )


def _warn_of_trained_prompts(recipe: Recipe, run: TrackedRun, prompts: FlyteFile) -> None:
    """Warn of held-out prompts that the champion was trained on."""
    from ebbflow.data.prompts import read_prompts
    from ebbflow.registry.trained_prompts import describe_trained_prompts

    held_out = read_prompts(fetch_artifact_once(prompts), "held_out")
    trained = describe_trained_prompts(run.tracking_uri, recipe.promotion.model_name, held_out)
    if trained:
        warnings.warn(trained, stacklevel=1)


def _evaluate_version(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    prompts: FlyteFile,
    version: Champion,
    label: str,
) -> EvaluatedPolicy:
    """Evaluate a registered version."""
    from ebbflow.evaluation.evaluate import evaluate_folder, require_same_image_size
    from ebbflow.registry.download import download_champion_folders
    from ebbflow.tracking.nodes import log_evaluation
    from ebbflow.training.rounds import call_on_first

    # "champion evaluation" and "anchor evaluation", whichever version that is.
    node = f"{label.split()[0]} evaluation"
    samples = call_on_first(lambda: make_node_output(run, node, "samples.parquet"))
    downloaded = call_on_first(lambda: make_node_output(run, node, label.split()[0]))
    with open_node_run_once(run, node) as run_logger:
        base_folder = fetch_artifact_once(base.folder)
        # A champion may have been trained from another base model than this run's.
        version_base, policy = call_on_first(
            lambda: download_champion_folders(version, downloaded, base_folder)
        )
        require_same_image_size(recipe, policy)
        evaluation = evaluate_folder(
            recipe, version_base, policy, fetch_artifact_once(prompts), label, samples, run.look
        )
        if run_logger:
            log_evaluation(run_logger, evaluation, samples)
    return _wrap_evaluation(policy, evaluation, samples)


def _wrap_evaluation(policy: Path, evaluation: Evaluation, samples: Path) -> EvaluatedPolicy:
    trained = TrainedPolicy(folder=FlyteDirectory(str(policy)))
    return EvaluatedPolicy(policy=trained, evaluation=evaluation, samples=FlyteFile(str(samples)))


def _find_base_anchor(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    prompts: FlyteFile,
    before: EvaluatedPolicy,
) -> AnchorPolicy:
    """Evaluate the base model, unless the run starts from it and has done so."""
    from ebbflow.evaluation.evaluate import evaluate_folder
    from ebbflow.storage.artifacts import verify_folder
    from ebbflow.tracking.nodes import log_evaluation
    from ebbflow.training.policy_metadata import write_base_policy
    from ebbflow.training.rounds import call_on_first

    label = "the base model"
    if recipe.policy.start is None:
        return AnchorPolicy(label=label, evaluated=before)
    node = "anchor evaluation"
    samples = call_on_first(lambda: make_node_output(run, node, "samples.parquet"))
    policy = call_on_first(lambda: make_node_output(run, node, "policy"))
    with open_node_run_once(run, node) as run_logger:
        base_folder = fetch_artifact_once(base.folder)
        call_on_first(
            lambda: write_base_policy(
                policy,
                verify_folder(base_folder),
                recipe.digest,
                recipe.policy,
                recipe.model,
                recipe.evaluation,
            )
        )
        evaluation = evaluate_folder(
            recipe, base_folder, policy, fetch_artifact_once(prompts), label, samples, run.look
        )
        if run_logger:
            log_evaluation(run_logger, evaluation, samples)
    return AnchorPolicy(label=label, evaluated=_wrap_evaluation(policy, evaluation, samples))
