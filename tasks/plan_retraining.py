"""Plan one night of a schedule: its seed, and whether anything has changed that a new training
could learn from.
"""

from __future__ import annotations

import hashlib
import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from flytekit import task

from ebbflow.recipe import Recipe
from ebbflow.recipe.digest import select_set_keys
from ebbflow.recipe.recipe import SEEDS
from tasks.files import fetch_data, fetch_prompt_file
from tasks.resources import light_resources
from tasks.sources import CODE

logger = logging.getLogger(__name__)


class Retraining(NamedTuple):
    """What a night does; with ``unchanged``, a sentence, it trains nothing."""

    recipe: Recipe
    inputs_digest: str
    unchanged: str


@task(**light_resources())
def plan_retraining(recipe: Recipe, kickoff_time: datetime) -> Retraining:
    """Give the recipe the seed of its night, and look for a finished night with the same inputs:
    recipe, code, contents of the files of prompts, preference pairs and data, and champion.
    """
    from ebbflow.launch import pin_rewards
    from ebbflow.registry.lookup import find_champion
    from ebbflow.storage.disk import sha256_of_file
    from ebbflow.storage.identity import compute_code_digest
    from ebbflow.tracking.parent_run import find_retraining
    from ebbflow.tracking.store import resolve_tracking_uri

    # Of this night: a new version of a reward model is something to learn from.
    recipe = pin_rewards(recipe)
    seeded = recipe.model_copy(update={"seed": int(kickoff_time.timestamp()) % SEEDS})
    champion = find_champion(resolve_tracking_uri(recipe), recipe.promotion.model_name)
    files = [*recipe.prompts.source_files, recipe.prompts.held_out_source]
    sources = [file for stage in recipe.stages for file in stage.source_files]
    inputs = {
        # Without files the seed makes the prompts, so that those of every night are new.
        "recipe": select_set_keys(recipe if recipe.prompts.source_files else seeded),
        "code": compute_code_digest(*CODE),
        "prompts": [sha256_of_file(fetch_prompt_file(file)) for file in files if file],
        "pairs": [_digest_source(fetch_data(file)) for file in sources],
        "champion": champion.version if champion else None,
    }
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    earlier = find_retraining(recipe, digest)
    if earlier is None:
        return Retraining(seeded, digest, "")
    day = datetime.fromtimestamp(earlier.info.start_time / 1000, UTC)
    unchanged = (
        f"nothing changed since run {earlier.info.run_name} of {day:%Y-%m-%d %H:%M} UTC: recipe,"
        f" code, prompts and champion ({champion.version if champion else 'none'}) are the same;"
        " nothing was trained"
    )
    logger.info("%s", unchanged)
    return Retraining(seeded, digest, unchanged)


def _digest_source(path: Path) -> str:
    from ebbflow.storage.artifacts import digest_of_folder
    from ebbflow.storage.disk import sha256_of_file

    return digest_of_folder(path) if path.is_dir() else sha256_of_file(path)
