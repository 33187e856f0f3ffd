"""What a training stage takes over from the policy folder before it, and what it leaves behind in
its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ebbflow.algorithms.advantages import PromptStatistics
from ebbflow.algorithms.base import FOLLOWING, SURROGATE
from ebbflow.compute import log_device, set_up_process
from ebbflow.data.records import StageRecord
from ebbflow.models import Model, load_model
from ebbflow.models.compile import compile_blocks
from ebbflow.recipe import Recipe
from ebbflow.recipe.base import sanitize_text
from ebbflow.recipe.students import teacher_copy_name
from ebbflow.stage import StageContext
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import (
    AGAIN,
    ITERATE,
    STATISTICS,
    PolicyError,
    PolicyMetadata,
    choose_policy_config,
    read_policy_metadata,
    require_base,
)
from ebbflow.training.update import PolicyUpdater


def open_model(recipe: Recipe, base: Path) -> Model:
    """Load the base model, in a process set up as the recipe says, with its blocks compiled where
    that says so.

    Raises:
        ModelError: as ``load_model`` and ``compile_blocks``.
    """
    set_up_process(recipe)
    log_device()
    model = load_model(base, recipe.model, weights_later=True)
    if recipe.model.compile == "blocks":
        compile_blocks(model)
    return model


def open_policy(
    ctx: StageContext,
    model: Model,
    folder: Path,
    teachers: Mapping[str, Path] | None = None,
    shard: bool = False,
    replicas: int = 1,
    context_parallel: int = 1,
) -> tuple[Policy, PolicyMetadata]:
    """Open the policy of a folder, ready for a stage, with every copy that the stage needs.

    Copies that the folder brought along are kept; the others start at its parameters.

    Args:
        teachers: policy folders by the copy that each becomes.
        shard, replicas, context_parallel: as of ``Policy``.
    """
    policy = Policy(
        model,
        choose_policy_config(ctx.recipe.policy, folder),
        ctx.recipe.seed,
        shard,
        replicas,
        ctx.recipe.model.cpu_offload,
        ctx.recipe.model.fsdp,
        context_parallel,
    )
    metadata = policy.load_folder(folder, to_train=True)
    # Copies follow the policy by the schedule of an algorithm. Another one begins its own anew,
    # from where the policy is now.
    if metadata.progress.algorithm != ctx.config.algorithm_name:
        for name in FOLLOWING:
            policy.copies.pop(name, None)
    for copy, teacher in (teachers or {}).items():
        _require_same_base(metadata, read_policy_metadata(teacher), teacher)
        policy.load_copy(copy, teacher)
    # Teachers of single prompt sets are written down with what was committed, so that the policy
    # says from whom it learnt.
    prefix = teacher_copy_name("")
    teacher_digests = {
        copy.removeprefix(prefix): verify_folder(path)
        for copy, path in (teachers or {}).items()
        if copy.startswith(prefix)
    }
    if teacher_digests:
        metadata = metadata.model_copy(update={"teachers": teacher_digests})
    if ctx.starts_as_teacher:
        # What was evaluated: of a policy with an average, not what training goes on from.
        policy.load_copy("teacher", folder)
    for name in ctx.following_copies:
        # A surrogate reward is what a denoiser of many steps has learnt beyond the teacher.
        policy.ensure_copy(name, "teacher" if name in SURROGATE else "current")
    if ctx.recipe.policy.ema:
        policy.ensure_copy("ema")
    return policy, metadata


def load_policy(
    ctx: StageContext,
    base: Path,
    folder: Path,
    teachers: Mapping[str, Path] | None = None,
    shard: bool = False,
    replicas: int = 1,
    context_parallel: int = 1,
) -> tuple[Policy, PolicyMetadata]:
    """Open a policy (``open_policy``) on the base model in a folder, once that is the one that the
    policy was trained from.

    Raises:
        ArtifactError: a folder is not what was committed.
        PolicyError: the policy was trained from another base model.
    """
    # Before the model is loaded, which takes minutes.
    require_base(read_policy_metadata(folder), base, folder)
    return open_policy(
        ctx, open_model(ctx.recipe, base), folder, teachers, shard, replicas, context_parallel
    )


def _require_same_base(metadata: PolicyMetadata, other: PolicyMetadata, folder: Path) -> None:
    if (other.model.family, other.base_digest) != (metadata.model.family, metadata.base_digest):
        raise PolicyError(
            f"the teacher in {folder} was trained from the {other.model.family} model"
            f" {other.base_digest[:12]} and this policy from the {metadata.model.family} model"
            f" {metadata.base_digest[:12]}; take a teacher of the same base"
        )


def read_prompt_statistics(
    ctx: StageContext, metadata: PolicyMetadata, folder: Path
) -> PromptStatistics:
    """Read the rewards of each prompt so far: those in the policy folder, if the same algorithm
    left them there.
    """
    path = folder / STATISTICS
    if metadata.progress.algorithm != ctx.config.algorithm_name or not path.exists():
        return PromptStatistics()
    try:
        return PromptStatistics.from_state_dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise PolicyError(
            f"{path} holds no rewards of prompts ({sanitize_text(str(error), 200)}); {AGAIN}"
        ) from None


def save_policy(
    ctx: StageContext,
    updater: PolicyUpdater,
    metadata: PolicyMetadata,
    record: StageRecord,
    folder: Path,
    write: bool = True,
    history: PromptStatistics | None = None,
) -> None:
    """Write the policy folder that a stage leaves behind; ``metadata`` is the one it started
    from."""
    copies: list[str] = list(ctx.following_copies)
    if ctx.recipe.policy.ema:
        copies.append(ITERATE)  # the folder's weights are the average
    trained = metadata.model_copy(
        update={
            "recipe_digest": ctx.recipe.digest,
            "version": metadata.version + updater.updates,
            "progress": updater.progress,
            "copies": tuple(copies),
            "stages": (*metadata.stages, record.label),
        }
    )
    statistics = history.state_dict() if history and ctx.config.advantages.running else None
    updater.policy.save_folder(folder, trained, write, statistics)
