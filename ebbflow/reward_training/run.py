"""Train the reward model of a recipe, register it, and let the gate decide: what the command and
the task share.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ebbflow.data.labels import read_labels
from ebbflow.recipe import Recipe
from ebbflow.registry.reward_models import (
    RewardModelVersion,
    fetch_reward_model,
    find_champion_reward_model,
    find_trained_reward_model,
    promote_reward_model,
    register_reward_model,
)
from ebbflow.reward_training.folder import (
    RewardModelRecord,
    compute_training_digest,
    read_record,
    require_reward_model_config,
    train_reward_folder,
)
from ebbflow.storage.disk import remove_path
from ebbflow.storage.layout import TRAININGS
from ebbflow.storage.locks import lock_folder
from ebbflow.tracking.store import resolve_tracking_uri


class TrainedRewardModel(NamedTuple):
    """A registered reward model, what was measured, and its folder."""

    version: RewardModelVersion
    record: RewardModelRecord
    folder: Path


def train_and_register(recipe: Recipe) -> TrainedRewardModel:
    """Train, register and promote. An attempt that was killed resumes; with the same labels, keys
    and code nothing is trained again.

    Raises:
        RecipeError: the recipe has no reward model.
        LabelFileError: its labels cannot be used.
        TrackingError: the store cannot be used, or the champion changed meanwhile.
    """
    config = require_reward_model_config(recipe)
    store = resolve_tracking_uri(recipe)
    # Read before anything is looked up: a broken label file fails in the first second.
    labels = read_labels(config.labels)
    digest = compute_training_digest(recipe, labels)
    version = find_trained_reward_model(store, config.name, digest)
    if version is None:
        # By the digest, so that an attempt with other labels does not resume this one.
        home = _make_home(recipe, digest)
        with lock_folder(home):
            version = _train_version(recipe, store, digest, home)
    folder = fetch_reward_model(store, version.uri, version.digest)
    record = read_record(folder)
    champion = find_champion_reward_model(store, config.name)
    # An attempt that was killed between the two leaves a version that the gate has passed; one that
    # was killed after the alias leaves it without the tag of a promotion.
    current = champion and champion.version
    if record.decision.promote and current in (record.compared_with, version.version):
        promote_reward_model(version, record.compared_with)
    return TrainedRewardModel(version, record, folder)


def _train_version(recipe: Recipe, store: str, digest: str, home: Path) -> RewardModelVersion:
    config = require_reward_model_config(recipe)
    champion = find_champion_reward_model(store, config.name)
    folder = home / "folder"
    record = train_reward_folder(
        recipe,
        read_labels(config.labels),
        folder,
        home / "checkpoint",
        fetch_reward_model(store, champion.uri, champion.digest) if champion else None,
        champion.version if champion else None,
    )
    measurement = record.measurement
    metrics = {
        "agreement": measurement.agreement.mean,
        "agreement_low": measurement.agreement.low,
        "agreement_high": measurement.agreement.high,
        "temperature": measurement.temperature,
        "calibration_error": measurement.calibration_error,
        "answers": record.answers,
    }
    tags = {
        "ebbflow.labels_digest": record.labels_digest,
        "ebbflow.compared_with": record.compared_with or "no champion",
        "ebbflow.decision": record.decision.model_dump_json()[:5000],
    }
    version = register_reward_model(recipe, config.name, folder, digest, metrics, tags)
    # The version is registered, with all files: nobody resumes this training any more.
    remove_path(folder)
    remove_path(home / "checkpoint")
    return version


def _make_home(recipe: Recipe, digest: str) -> Path:
    """Make the folder of a training; a cluster's pods have one of their own."""
    root = Path("." if "://" in recipe.output else recipe.output)
    home = root / TRAININGS / require_reward_model_config(recipe).name / digest[:12]
    home.mkdir(parents=True, exist_ok=True)
    return home
