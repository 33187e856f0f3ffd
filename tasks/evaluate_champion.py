"""Evaluate the registered champion on this run's prompts, so that the gate compares like with
like."""

from __future__ import annotations

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact, make_node_output
from tasks.resources import accelerated_resources
from tasks.types import BaseModelArtifact, ChampionPolicy, EvaluatedPolicy, TrainedPolicy


@task(cache=ONCE_PER_RUN, **accelerated_resources())
def evaluate_champion(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    prompts: FlyteFile,
    before: EvaluatedPolicy,
) -> ChampionPolicy:
    """Evaluate the champion, or return ``before``, the evaluation of the run's own start, if there
    is no champion yet.
    """
    from ebbflow.evaluation.evaluate import evaluate_folder, require_same_image_size
    from ebbflow.registry.promotion import download_champion_folders, find_champion
    from ebbflow.tracking.child_run import open_node_run
    from ebbflow.tracking.nodes import log_evaluation

    champion = find_champion(run.tracking_uri, recipe.promotion.model_name)
    if champion is None:
        return ChampionPolicy(version=None, evaluated=before)
    node = "champion evaluation"
    samples = make_node_output(run, node, "samples.parquet")
    downloaded = make_node_output(run, node, "champion")
    with open_node_run(run, node) as run_logger:
        # A champion may have been trained from another base model than this run's.
        champion_base, policy = download_champion_folders(
            champion, downloaded, fetch_artifact(base.folder)
        )
        require_same_image_size(recipe, policy)
        evaluation = evaluate_folder(
            recipe,
            champion_base,
            policy,
            fetch_artifact(prompts),
            f"champion v{champion.version}",
            samples,
        )
        log_evaluation(run_logger, evaluation, samples)
    trained = TrainedPolicy(folder=FlyteDirectory(str(policy)))
    evaluated = EvaluatedPolicy(
        policy=trained, evaluation=evaluation, samples=FlyteFile(str(samples))
    )
    return ChampionPolicy(version=champion.version, evaluated=evaluated)
