"""The policy whose pictures people label first: what the recipe trains before any reward counts."""

from __future__ import annotations

import logging
from pathlib import Path

from ebbflow.models import Model
from ebbflow.offline.data import encode_data, import_data
from ebbflow.offline.training import train_offline_folder
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.paths import resolve_local_path
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.disk import remove_path
from ebbflow.training.policy_io import open_model

logger = logging.getLogger(__name__)


def train_first_policy(
    recipe: Recipe, base: Path, policy: Path, prompts: Path, folder: Path
) -> Path:
    """Train the stages on captioned data with which a recipe begins from its base model
    (``only_from_base``); return the policy folder, which is ``policy`` where there is none.

    The first turn trains the same stages again, up to rounding to the same weights: people label
    pictures of the policy that it then trains on their taste.

    Args:
        prompts: the recipe's prompt table; no picture on its evaluated prompts is trained on.
        folder: a folder for each stage is made here, which a killed attempt leaves to the next.

    Raises:
        RecipeError: the data is behind a URI.
        DataError: the data cannot be used.
    """
    model: Model | None = None
    for index, stage in enumerate(recipe.stages):
        # Only the first ones: what comes after a stage with rewards needs the reward model.
        if stage.kind != "offline" or stage.data is None or not stage.only_from_base:
            break
        # Its folder appears whole, so that a killed attempt is resumed after its last stage.
        trained = folder / f"stage-{index}"
        if not trained.exists():
            model = model or open_model(recipe, base)
            _train_on_data(StageContext(recipe, 0, index), model, base, policy, prompts, trained)
        policy = trained
    return policy


def _train_on_data(
    ctx: StageContext, model: Model, base: Path, policy: Path, prompts: Path, trained: Path
) -> None:
    data = ctx.offline_config.data
    assert data
    # Only tasks download, and `ebbflow label` is none.
    if "://" in data.path:
        raise RecipeError(
            f"stages.{ctx.stage}.data.path = {data.path!r} is behind a URI, and the first pairs to"
            " label are of the policy that is trained on it; download it, and name the local path"
        )
    logger.info("%s: training the policy whose pictures are labelled", ctx.stage_label)
    latents = trained.with_name(f"{trained.name}-latents")
    # Of a killed attempt, which nobody can continue.
    remove_path(latents)
    latents.mkdir()
    path = resolve_local_path(data.path)
    imported = import_data(ctx, data, path, base, prompts, latents)
    shards = encode_data(ctx, data, model, path, imported.encoding, latents)
    train_offline_folder(
        ctx,
        StageFolders(base, policy, imported.prompts, trained),
        shards,
        imported.advantages,
        MetricsRecorder(),
    )
    remove_path(latents)
