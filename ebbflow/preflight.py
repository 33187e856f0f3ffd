"""Check what a recipe names, before a run costs anything."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ebbflow.data.pairs import check_pairs
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.algorithms import CustomAlgorithmConfig
from ebbflow.recipe.families import FAMILIES
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.plugins import import_path
from ebbflow.recipe.stages import StageConfig
from ebbflow.rewards.combine import load_scorer
from ebbflow.storage.artifacts import ArtifactError
from ebbflow.tracking.sinks import require_sinks
from ebbflow.training.policy_metadata import PolicyError, read_policy_metadata

LOCAL_PATH = "is a local path, which pods cannot see; upload it and give its URI"


def check_recipe(recipe: Recipe, tracking_uri: str, on_cluster: bool) -> None:
    """Check the files and folders that a recipe names, and that its rewards can run.

    Args:
        tracking_uri: the MLflow store that the recipe and the environment resolve to.
        on_cluster: every task has its own pod, and a pod's disk is deleted with it.

    Raises:
        RecipeError: the output folder cannot be written or shared, or a prompt file, pairs, teacher or base model is missing.
        PairError: the pairs file has wrong columns or an invalid first row.
        ModelError: the base-model folder is not one.
        RewardError: a reward cannot run here.
    """
    if on_cluster:
        _check_shared(recipe.output, tracking_uri)
    if "://" not in recipe.output:
        _check_writable(Path(recipe.output))
    if recipe.prompts.source and "://" not in recipe.prompts.source and not Path(recipe.prompts.source).is_file():
        raise RecipeError(f"prompts.source = {recipe.prompts.source!r}: no such file; remove it to generate prompts")
    for index, stage in enumerate(recipe.stages):
        if stage.kind == "offline" and stage.pairs and "://" not in stage.pairs:
            _check_pairs(f"stages.{index}.pairs = {stage.pairs!r}", Path(stage.pairs), on_cluster)
        _check_teacher(f"stages.{index}.algorithm", stage, on_cluster)
    for path in recipe.own_paths:
        import_path(path)
    _check_model(recipe.model, on_cluster)
    if (start := recipe.policy.start) and not start.on_hub:
        _check_start(start.path or "", on_cluster)
    load_scorer(recipe.rewards, recipe.guardrails)
    require_sinks(recipe)


def _check_shared(output: str, tracking_uri: str) -> None:
    if "://" not in output:
        raise RecipeError(f"output = {output!r} is on the disk of a pod and lost with it; give a URI such as s3://bucket/runs")
    if tracking_uri.startswith(("sqlite:", "file:")):
        raise RecipeError(
            f"the MLflow store {tracking_uri} is on the disk of a pod; set tracking.uri, or MLFLOW_TRACKING_URI in every pod, to "
            "a server"
        )


def _check_model(model: ModelConfig, on_cluster: bool) -> None:
    if model.family not in FAMILIES:
        from ebbflow.models.families import adapter_of  # imports torch

        adapter_of(model.family)
    elif model.path and "://" not in model.path and not model.on_hub:
        if on_cluster:
            raise RecipeError(f"model.path = {model.path!r} {LOCAL_PATH}")
        from ebbflow.models import check_folder  # imports torch

        check_folder(Path(model.path), model.family)


def _check_start(path: str, on_cluster: bool) -> None:
    if "://" in path:
        return
    if on_cluster:
        raise RecipeError(f"policy.start.path = {path!r} {LOCAL_PATH}")
    if not Path(path).exists():
        raise RecipeError(
            f"policy.start.path = {path!r}: no such file or folder; for a Hugging Face repository set policy.start.revision to a "
            "commit"
        )


def _check_pairs(key: str, path: Path, on_cluster: bool) -> None:
    if on_cluster:
        raise RecipeError(f"{key} {LOCAL_PATH}")
    if not path.is_file():
        raise RecipeError(f"{key}: no such file; remove it to generate and score rollouts")
    check_pairs(path)


def _check_teacher(algorithm: str, stage: StageConfig, on_cluster: bool) -> None:
    teacher = getattr(stage.hyper, "teacher", None)
    if teacher is None or "://" in teacher:
        return
    key = f"{algorithm}.{'options.' * isinstance(stage.algorithm, CustomAlgorithmConfig)}teacher = {teacher!r}"
    if on_cluster:
        raise RecipeError(f"{key} {LOCAL_PATH}")
    try:
        read_policy_metadata(Path(teacher))
    except (ArtifactError, PolicyError) as error:
        raise RecipeError(f"{key} is not the policy folder of an earlier run: {error}") from None


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RecipeError(f"output = {str(folder)!r} cannot be written ({error.strerror}); set another folder") from None
