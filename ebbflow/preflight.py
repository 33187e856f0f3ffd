"""Check what a recipe names, before a run costs anything: ``ebbflow check`` and a run's first task
call the same function.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from ebbflow.data.pairs import check_pairs
from ebbflow.data.prepare import prepare_prompt_table
from ebbflow.data.prompts import Prompt
from ebbflow.data.sized_pictures import describe_data
from ebbflow.preflight_models import (
    check_decodes_with_gradient,
    check_further_sizes,
    check_model,
    check_split_guidance,
)
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.algorithms import CustomAlgorithmConfig
from ebbflow.recipe.base import iter_leaves
from ebbflow.recipe.branches import BRANCH
from ebbflow.recipe.model import find_picture_size
from ebbflow.recipe.output_folder import check_output_folder
from ebbflow.recipe.paths import LOCAL_PATH, SHIPPED, list_shipped_files, resolve_local_path
from ebbflow.recipe.plugins import import_object
from ebbflow.recipe.pretrained import PretrainedSourceConfig
from ebbflow.recipe.problems import RecipeProblems
from ebbflow.recipe.recipe_file import find_locations
from ebbflow.recipe.rewards import CustomRewardConfig
from ebbflow.recipe.rollout_cache import require_quantization, require_whole_weights
from ebbflow.recipe.stages import StageConfig, is_trained_in_group
from ebbflow.rewards.combine import load_scorer
from ebbflow.rewards.trial import RewardTrial, try_reward
from ebbflow.run_notes import describe_gpus, describe_run, describe_shares
from ebbflow.storage.artifacts import ArtifactError
from ebbflow.tracking.node_sinks import check_sinks
from ebbflow.training.policy_metadata import METADATA, PolicyError, read_policy_metadata

WHERE = "a relative path is looked for next to the recipe, then in the working directory"
logger = logging.getLogger(__name__)
TRIED_PROMPTS = 2
TRIED_SIZE = 64
"""Pixels a side of the images that a reward is tried on, where the recipe leaves the size to the
model.
"""


def check_recipe(
    recipe: Recipe,
    tracking_uri: str,
    on_cluster: bool,
    context_parallel: int = 1,
    processes: int = 1,
    shards: int | None = None,
) -> list[str]:
    """Check the files and folders that a recipe names, what its base model can draw, and that its
    own code and rewards work, and that the gate can compare policies on its prompts.

    Several errors are raised as one of the first one's type, a line each.
    Nothing is written or downloaded. A user's own loss is called on random rows, and, but for a
    cluster, whose first pod has no GPU, a user's own reward on small images.

    Args:
        tracking_uri: the MLflow store that the recipe and the environment resolve to.
        on_cluster: every task has its own pod, and a pod's disk is deleted with it.
        context_parallel: processes that share the tokens of a sample in training.
        processes: that train an offline stage or run a colocated one, those of all nodes.
        shards: those of them that share one copy of the model; default: all.

    Returns:
        What a reader of the recipe may want to know, a line each (``ebbflow.run_notes``).

    Raises:
        RecipeError: the output folder cannot be written or shared, a prompt file, pairs, teacher,
            start or base model is missing, or a user's own code is not what it must be; an
            optimizer is not installed, or not for so many processes.
        PromptError: the prompts cannot be used or are too few, or the gate could never promote a
            policy on them.
        PairError: the pairs file has wrong columns or an invalid first row.
        DataError: captioned data, or a picture of it, cannot be used.
        ModelError: the base-model folder is not one, or the model cannot draw the recipe's size,
            share its tokens, or decode or predict with the gradient that a stage needs.
        RewardError: a reward cannot run here, or a user's own breaks its contract.
    """
    problems = RecipeProblems(find_locations(recipe))
    with problems.collect("output"):
        _check_output(recipe.output, tracking_uri, on_cluster)
    # What costs little is checked first: a wrong path should not wait for an import of torch.
    prepared = None
    notes = []
    with problems.collect("prompts"):
        prepared = read_prompt_table(recipe, on_cluster)
        notes = [*describe_run(recipe, prepared), *describe_shares(recipe, processes)]
    _check_stages(problems, recipe, on_cluster, processes if shards is None else shards)
    notes += _describe_data(problems, recipe, prepared[0] if prepared else None, on_cluster)
    _check_code_and_model(problems, recipe, on_cluster, context_parallel)
    trials: dict[str, RewardTrial] = {}
    # The first pod of a cluster has no GPU, and a reward that cannot be built has been reported.
    if prepared and not on_cluster and not problems.has("rewards"):
        with problems.collect("rewards"):
            trials = _try_rewards(recipe, _choose_tried_prompts(recipe, prepared[0]))
    problems.raise_all()
    notes += _describe_unscored_noise(trials)
    _warn_of_unread_prompts(recipe, trials)
    if not on_cluster:
        notes += describe_gpus(recipe)
    return notes


def _check_output(output: str, tracking_uri: str, on_cluster: bool) -> None:
    if on_cluster:
        _check_shared_storage(output, tracking_uri)
    if "://" not in output:
        check_output_folder(output)


def _describe_unscored_noise(trials: dict[str, RewardTrial]) -> list[str]:
    """Say which rewards scored none of the tried images."""
    # No error: the images are noise, in which a reward may find nothing to score.
    return [
        f"the reward {column} gave no score to any of {len(trial.reasons)} images of noise"
        f" ({trial.reasons[0]}); if it gives none to the model's images either, the run stops, or"
        " the gate refuses"
        for column, trial in trials.items()
        if trial.reasons
    ]


def _check_code_and_model(
    problems: RecipeProblems, recipe: Recipe, on_cluster: bool, context_parallel: int
) -> None:
    """Check the code that a recipe names, its model, start, rewards and sinks: with torch and
    diffusers, whose import takes seconds.
    """
    logger.info("checking the model %s, the losses and the rewards", recipe.model.family)
    for path in recipe.plugin_paths:
        with problems.collect(_find_key_of_value(recipe, path)):
            import_object(path)
    with problems.collect("stages"):
        _try_losses(recipe)
    with problems.collect("model"):
        check_model(recipe.model, on_cluster)
        check_further_sizes(recipe)
        check_split_guidance(recipe)
        if context_parallel > 1:
            from ebbflow.models.sizes import check_shared_tokens  # imports torch

            check_shared_tokens(recipe, context_parallel)
    start = recipe.policy.start
    # A champion is in the registry, and is compared with its digests when it is downloaded.
    if isinstance(start, PretrainedSourceConfig) and not start.is_on_hub:
        with problems.collect("policy.start.path"):
            _check_start(start.path or "", on_cluster)
    with problems.collect("rewards"):
        _check_rewards(recipe)
    with problems.collect("tracking.sinks"):
        check_sinks(recipe)
    _warn_of_evaluation_sampler(recipe)


def _find_key_of_value(recipe: Recipe, value: str) -> str:
    """Find the first key of the recipe that has a value; the empty key where none has."""
    for path, leaf in iter_leaves(recipe.model_dump(mode="json")):
        if leaf == value:
            return ".".join(map(str, path))
    return ""


def _check_stages(problems: RecipeProblems, recipe: Recipe, on_cluster: bool, shards: int) -> None:
    """Check pairs, teachers and optimizers, which each stage has of its own."""
    for index, stage in enumerate(recipe.stages):
        key = f"stages.{index}"
        if stage.kind == "offline" and stage.pairs and "://" not in stage.pairs:
            with problems.collect(f"{key}.pairs"):
                _check_pairs(f"{key}.pairs = {stage.pairs!r}", Path(stage.pairs), on_cluster)
        with problems.collect(f"{key}.algorithm"):
            _check_teachers(f"{key}.algorithm", stage, on_cluster)
        with problems.collect(f"{key}.optimizer"):
            sharded = shards > 1 and is_trained_in_group(stage)
            stage.optimizer.require_whole_state(f"{key}.optimizer", sharded)
            # On a cluster, the image of training pods may be the only one that has the package.
            if not on_cluster:
                stage.optimizer.require_package(f"{key}.optimizer")
        with problems.collect(f"{key}.rollout_quantization"):
            require_whole_weights(stage, key, shards)
            if not on_cluster:
                require_quantization(stage, key)


def _describe_data(
    problems: RecipeProblems, recipe: Recipe, prompts: pa.Table | None, on_cluster: bool
) -> list[str]:
    """Read the captioned data of each stage; return a line about each."""
    evaluated = set[str]()
    if prompts is not None:
        evaluated_rows = prompts.filter(pc.not_equal(prompts["split"], "train"))
        evaluated = set(evaluated_rows["prompt"].to_pylist())
    lines = []
    for index, stage in enumerate(recipe.stages):
        data = stage.captioned_data
        if data is None or "://" in data.path:
            continue
        key = f"stages.{index}.data"
        with problems.collect(key):
            if on_cluster and not data.path.startswith(SHIPPED):
                raise RecipeError(f"{key}.path = {data.path!r} {LOCAL_PATH}")
            path = resolve_local_path(data.path)
            if not path.exists():
                raise RecipeError(f"{key}.path = {data.path!r}: no such file or folder; {WHERE}")
            size = find_picture_size(recipe.model)
            described = describe_data(data, path, recipe.model.frames, size, evaluated)
            lines.append(f"{key}: {described}")
    return lines


def _check_rewards(recipe: Recipe) -> None:
    """Check that the rewards of every branch can run, with a gradient where one is needed."""
    # None stands for the stages outside branches.
    for branch in (None, *recipe.branches):
        branch_recipe = recipe.select_branch(branch)
        scorer = load_scorer(branch_recipe.rewards, branch_recipe.guardrails)
        load_scorer(branch_recipe.evaluated_rewards, ())
        for stage in recipe.stages:
            if stage.branch == branch and stage.algorithm_kind.needs_reward_gradient:
                scorer.require_gradients(stage.algorithm_name)
                if scorer.trains_on_images:
                    check_decodes_with_gradient(recipe.model.family, stage.algorithm_name)


def read_prompt_table(recipe: Recipe, on_cluster: bool) -> tuple[pa.Table, str] | None:
    """Read the prompts as the run will, with a sentence about them; None for files of which one is
    behind a URI.
    """
    key = "prompts.mixture" if recipe.prompts.mixture else "prompts.source"
    files = [
        _find_prompt_file(key, source, on_cluster)
        for source in recipe.prompts.source_files
        if "://" not in source
    ]
    held_out_source = recipe.prompts.held_out_source
    held_out = None
    if held_out_source and "://" not in held_out_source:
        held_out = _find_prompt_file("prompts.held_out_source", held_out_source, on_cluster)
    # Nothing is downloaded here, so prompts behind a URI are first read by the run itself.
    if len(files) < len(recipe.prompts.source_files) or (held_out_source and not held_out):
        return None
    return prepare_prompt_table(recipe, *files, held_out=held_out)


def _choose_tried_prompts(recipe: Recipe, table: pa.Table) -> list[Prompt]:
    """Return the prompts that a user's own rewards are tried on."""
    training = table
    held_out_source = recipe.prompts.held_out_source
    if held_out_source:
        training = table.filter(pc.not_equal(table["split"], "held_out"))
    # Some of each prompt set: a reward may be for one of the sets only.
    parts = [
        training.filter(pc.equal(training["source"], name))
        for name in recipe.prompts.prompt_set_labels
    ] or [training]
    tried = [part.slice(0, TRIED_PROMPTS) for part in parts]
    if held_out_source:
        # Held-out prompts of a file of their own come first and may have other columns.
        tried.append(table.slice(0, 1))
    return [Prompt(**row) for part in tried for row in part.to_pylist()]


def _find_prompt_file(key: str, source: str, on_cluster: bool) -> Path:
    path = resolve_local_path(source)
    entry = f"{key} = {source!r}"
    # Also on a cluster: the user's own image may have the file.
    if path.is_file():
        return path
    if source.startswith(SHIPPED):
        raise RecipeError(
            f"{entry}: Ebbflow ships no such file; take {' or '.join(list_shipped_files())}"
        )
    if on_cluster:
        raise RecipeError(f"{entry} {LOCAL_PATH}")
    instead = (
        "hold out prompts of the training set"
        if key == "prompts.held_out_source"
        else "generate prompts"
    )
    raise RecipeError(f"{entry}: no such file; {WHERE}. Remove it to {instead}")


def _try_losses(recipe: Recipe) -> None:
    for stage in recipe.stages:
        if isinstance(stage.algorithm, CustomAlgorithmConfig):
            from ebbflow.training.trial import try_loss  # imports torch

            try_loss(stage.algorithm.path, *stage.algorithm.load_algorithm())


def _try_rewards(recipe: Recipe, prompts: list[Prompt]) -> dict[str, RewardTrial]:
    """Try a user's own rewards, by their columns."""
    model = recipe.model
    height, width = find_picture_size(model) or (TRIED_SIZE, TRIED_SIZE)
    branch_rewards = [config for branch in recipe.branches.values() for config in branch.rewards]
    trials = {}
    for config in (*recipe.rewards, *recipe.guardrails, *branch_rewards):
        # Ebbflow's own rewards have tests, and some would load gigabytes.
        if isinstance(config, CustomRewardConfig):
            applicable = [prompt for prompt in prompts if config.applies_to(prompt.source)]
            tried = applicable[:TRIED_PROMPTS]
            trials[config.column] = try_reward(config, tried, height, width, model.frames)
    return trials


def _warn_of_unread_prompts(recipe: Recipe, trials: Mapping[str, RewardTrial]) -> None:
    """Warn where no reward of a stage depends on the prompt: the policy may forget what to show."""
    # A branch may have rewards of its own; the stages outside branches have those of the recipe.
    for branch in dict.fromkeys(stage.branch for stage in recipe.stages):
        rewards = recipe.select_branch(branch).rewards
        if all(
            config.ignores_prompt
            or (config.column in trials and trials[config.column].ignores_prompt)
            for config in rewards
        ):
            key = f"branches.{branch}.rewards" if branch else "rewards"
            columns = ", ".join(config.column for config in rewards)
            warnings.warn(
                f"{key}: no score depends on the prompt ({columns}), so a policy may gain by images"
                " that do not show their prompts; add a reward that reads them, such as ocr,"
                " clipscore or pickscore",
                stacklevel=3,
            )


def _check_shared_storage(output: str, tracking_uri: str) -> None:
    if "://" not in output:
        raise RecipeError(
            f"output = {output!r} is on the disk of a pod and lost with it; give a URI such as"
            " s3://bucket/runs"
        )
    if tracking_uri.startswith(("sqlite:", "file:")):
        raise RecipeError(
            f"the MLflow store {tracking_uri} is on the disk of a pod; set tracking.uri, or"
            " MLFLOW_TRACKING_URI in every pod, to a server"
        )


def _warn_of_evaluation_sampler(recipe: Recipe) -> None:
    """Warn where a few-step student would be evaluated with another sampler than its own, whose
    states it has not learned.
    """
    students = [
        index for index, stage in enumerate(recipe.stages) if stage.algorithm_kind.trains_student
    ]
    if not students:
        return
    trained = recipe.stages[students[-1]].sampler
    evaluated = recipe.evaluation.sampler_with_steps
    if trained != evaluated:
        eta = "" if trained.eta is None else f"eta: {trained.eta:g}, "
        warnings.warn(
            f"stages.{students[-1]} trains a student for its own sampler, and it would be evaluated"
            f" and served with another, {evaluated.name} in {evaluated.steps} steps; set"
            f" evaluation: {{sampler: {trained.name}, {eta}steps: {trained.steps}}}",
            stacklevel=3,
        )


def _check_start(path: str, on_cluster: bool) -> None:
    if "://" in path:
        return
    if on_cluster:
        raise RecipeError(f"policy.start.path = {path!r} {LOCAL_PATH}")
    if not Path(path).exists():
        raise RecipeError(
            f"policy.start.path = {path!r}: no such file or folder; {WHERE}. For a Hugging Face"
            " repository set policy.start.revision to a commit"
        )
    # A policy folder, a folder with a LoRA of another library, or the LoRA's file itself.
    names = [path] if Path(path).is_file() else [file.name for file in Path(path).iterdir()]
    if not any(name.endswith((".safetensors", METADATA)) for name in names):
        raise RecipeError(
            f"policy.start.path = {path!r} is no policy folder and holds no LoRA (.safetensors);"
            " name one of them"
        )


def _check_pairs(key: str, path: Path, on_cluster: bool) -> None:
    if on_cluster:
        raise RecipeError(f"{key} {LOCAL_PATH}")
    if not path.is_file():
        raise RecipeError(f"{key}: no such file; {WHERE}. Remove it to generate and score rollouts")
    check_pairs(path)


def _check_teachers(algorithm: str, stage: StageConfig, on_cluster: bool) -> None:
    # The hyper-parameters of a user's own algorithm are one level deeper in the recipe.
    is_custom = isinstance(stage.algorithm, CustomAlgorithmConfig)
    section = f"{algorithm}.options." if is_custom else f"{algorithm}."
    # Of the built-in algorithms, distillation has a teacher, or several by prompt set.
    teacher = getattr(stage.hyper_parameters, "teacher", None)
    if teacher:
        _check_teacher(f"{section}teacher = {teacher!r}", teacher, on_cluster)
    for name, teacher in getattr(stage.hyper_parameters, "teachers", {}).items():
        _check_teacher(f"{section}teachers.{name} = {teacher!r}", teacher, on_cluster)


def _check_teacher(key: str, teacher: str, on_cluster: bool) -> None:
    if "://" in teacher or teacher.startswith(BRANCH):
        return
    if on_cluster:
        raise RecipeError(f"{key} {LOCAL_PATH}")
    try:
        read_policy_metadata(Path(teacher))
    except (ArtifactError, PolicyError) as error:
        raise RecipeError(f"{key} is not the policy folder of an earlier run: {error}") from None
