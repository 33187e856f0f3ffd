"""Reward models as versions of registered MLflow models, and the pins of the recipes that name
them.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlflow.artifacts
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from ebbflow.recipe import Recipe
from ebbflow.recipe.rewards import RewardConfig
from ebbflow.registry.lock import CHAMPION, find_version_by_alias, hold_registry_lock
from ebbflow.registry.lookup import find_named_version
from ebbflow.registry.model_version import RegistryError, raise_registry_errors
from ebbflow.registry.promotion import (
    CHALLENGER,
    PREVIOUS,
    REPLACES,
    ensure_registered_model,
)
from ebbflow.rewards.built_in.model import MODELS, ModelRewardConfig
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.locks import wait_for_lock
from ebbflow.storage.user_cache import find_user_cache
from ebbflow.tracking.store import (
    allow_long_uploads,
    connect_to_store,
    create_run,
    resolve_tracking_uri,
)

REWARD_DIGEST = "ebbflow.reward_digest"
"""The digest of the folder of a reward model."""
TRAINING_DIGEST = "ebbflow.reward_training_digest"
"""The digest of everything that it was made from: an equal one is not trained again."""
FOLDER = "reward_model"
logger = logging.getLogger(__name__)


class RewardModelVersion(NamedTuple):
    """A registered reward model: ``models:/<name>/<version>`` in a store."""

    store: str
    name: str
    version: str
    digest: str

    @property
    def uri(self) -> str:
        return f"{MODELS}{self.name}/{self.version}"


def find_reward_model(store: str, named: str) -> RewardModelVersion:
    """Find what ``models:/NAME/VERSION`` or ``models:/NAME@alias`` names.

    Raises:
        RegistryError: there is none, or it is no reward model.
    """
    version = find_named_version(store, named.removeprefix(MODELS))
    if REWARD_DIGEST not in version.tags:
        raise RegistryError(
            f"{version.name!r} version {version.version} is no reward model; name one that `ebbflow"
            " train-reward` has registered"
        )
    return _describe_version(store, version)


def find_champion_reward_model(store: str, name: str) -> RewardModelVersion | None:
    """Find the champion of a registered reward model; None if there is none."""
    with raise_registry_errors(f"look up the champion of {name!r}", store):
        version = find_version_by_alias(connect_to_store(store), name, CHAMPION)
    return _describe_version(store, version) if version else None


def find_trained_reward_model(
    store: str, name: str, training_digest: str
) -> RewardModelVersion | None:
    """Find the version that was made from exactly these inputs; None if there is none."""
    with raise_registry_errors(f"look up the versions of {name!r}", store):
        versions = connect_to_store(store).search_model_versions(
            f"name = '{name}' and tags.`{TRAINING_DIGEST}` = '{training_digest}'"
        )
    oldest = min(versions, key=lambda version: int(version.version), default=None)
    return _describe_version(store, oldest) if oldest else None


def _describe_version(store: str, version: ModelVersion) -> RewardModelVersion:
    digest = version.tags.get(REWARD_DIGEST, "")
    return RewardModelVersion(store, version.name, str(version.version), digest)


def register_reward_model(
    recipe: Recipe,
    name: str,
    folder: Path,
    training_digest: str,
    metrics: Mapping[str, float],
    tags: Mapping[str, str],
) -> RewardModelVersion:
    """Register a committed folder as challenger, with an MLflow run of its own. A retry ends with
    the same version.

    Raises:
        RegistryError: a write failed.
    """
    store = resolve_tracking_uri(recipe)
    client = connect_to_store(store)
    digest = verify_folder(folder)
    identity = {TRAINING_DIGEST: training_digest}
    with raise_registry_errors(f"register the reward model {name!r}", store):
        found = find_trained_reward_model(store, name, training_digest)
        if found:
            return found
        experiment = client.get_experiment_by_name(recipe.tracking.experiment)
        experiment_id = (
            experiment.experiment_id
            if experiment
            else client.create_experiment(recipe.tracking.experiment)
        )
        run = create_run(client, experiment_id, identity, {}, f"reward model {name}")
        run_id = run.info.run_id
        for key, value in metrics.items():
            client.log_metric(run_id, key, value)
        ensure_registered_model(client, name)
        # The order matters to a killed attempt: what has no version yet is made again.
        # A version needs a logged model; MLflow takes the folder as it is.
        model = client.create_logged_model(
            experiment_id, name=name, source_run_id=run_id, model_type="reward model"
        )
        with allow_long_uploads():
            client.log_model_artifacts(model.model_id, str(folder))
        client.finalize_logged_model(model.model_id, "READY")
        client.set_terminated(run_id)
        version = client.create_model_version(
            name,
            model.artifact_location,
            run_id,
            tags={**tags, **identity, REWARD_DIGEST: digest},
            model_id=model.model_id,
        )
        client.set_registered_model_alias(name, CHALLENGER, str(version.version))
    logger.info("registered the reward model %r version %s", name, version.version)
    return _describe_version(store, version)


def promote_reward_model(version: RewardModelVersion, replaced: str | None) -> None:
    """Make a version champion. One that was champion before stays as it is: a person has moved the
    alias since, and their choice stands until a new version is better.

    Args:
        replaced: the version that it was compared with; None if there was no champion.

    Raises:
        RegistryError: another version has become champion since, or a write failed.
    """
    client = connect_to_store(version.store)
    with (
        raise_registry_errors(f"promote {version.name!r} version {version.version}", version.store),
        hold_registry_lock(client, version.name, version.version, replaced) as require_lock,
    ):
        champion = find_version_by_alias(client, version.name, CHAMPION)
        current = str(champion.version) if champion else None
        if current == version.version:
            # Again after an attempt that died between the alias and the tag.
            _mark_promoted(client, version, replaced)
            return
        tags = client.get_model_version(version.name, version.version).tags
        if REPLACES in tags:
            logger.warning(
                "version %s of the reward model %r was champion once, and somebody has moved the"
                " alias since; it is not promoted again",
                version.version,
                version.name,
            )
            return
        # Somebody promoted another version meanwhile: this one was not compared with it.
        if current != replaced:
            raise RegistryError(
                f"version {current} of {version.name!r} has become champion, and version"
                f" {version.version} was compared with {replaced or 'none'}; train again"
            )
        require_lock()
        if current:
            client.set_registered_model_alias(version.name, PREVIOUS, current)
        client.set_registered_model_alias(version.name, CHAMPION, version.version)
        _mark_promoted(client, version, replaced)


def _mark_promoted(client: MlflowClient, version: RewardModelVersion, replaced: str | None) -> None:
    """Write that a version has been champion; aliases have no history."""
    client.set_model_version_tag(version.name, version.version, REPLACES, replaced or "")


def fetch_reward_model(store: str | None, uri: str, digest: str | None) -> Path:
    """Return the folder of a registered reward model, downloaded once per user of this machine.

    Args:
        store: where it is registered; None takes ``MLFLOW_TRACKING_URI``.

    Raises:
        RegistryError: there is no such version, or it is not what was registered.
    """
    store = store or os.environ.get("MLFLOW_TRACKING_URI")
    if not store:
        raise RegistryError(f"{uri}: no MLflow store is named; set 'store' or MLFLOW_TRACKING_URI")
    version = find_reward_model(store, uri)
    _require_digest(version, uri, digest)
    folder = _cache_folder() / version.digest
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with wait_for_lock(folder.with_suffix(".lock")):
            if not folder.exists():
                _download_folder(version, folder)
    if verify_folder(folder) != version.digest:
        raise RegistryError(f"{folder} is not what was registered as {uri}; delete it")
    return folder


def _require_digest(version: RewardModelVersion, uri: str, digest: str | None) -> None:
    if digest is not None and digest != version.digest:
        raise RegistryError(
            f"{uri} has the digest {version.digest[:12]}, and the recipe says {digest[:12]}; name"
            " the version that the recipe means"
        )


def _cache_folder() -> Path:
    return find_user_cache("reward_models")


def _download_folder(version: RewardModelVersion, folder: Path) -> None:
    client = connect_to_store(version.store)
    with (
        raise_registry_errors(f"download {version.uri}", version.store),
        tempfile.TemporaryDirectory(dir=folder.parent) as scratch,
    ):
        location = client.get_model_version_download_uri(version.name, version.version)
        downloaded = mlflow.artifacts.download_artifacts(
            location, dst_path=scratch, tracking_uri=version.store
        )
        # MLflow may add a file of its own, which the manifest does not know.
        (Path(downloaded) / "registered_model_meta").unlink(missing_ok=True)
        shutil.move(downloaded, folder)


def pin_reward_models(recipe: Recipe, with_store: bool = True) -> Recipe:
    """Return the recipe with every registered reward model by its version, store and digest, so
    that all tasks of a run score with the same one and its record says which.

    Args:
        with_store: False for a recipe that runs on another machine, which knows the store by
            another address: the run adds its own as it starts.

    Raises:
        RegistryError: one of them does not exist, or has another digest than the recipe says.
    """
    pinned = {
        key: [_pin_reward(recipe, reward, with_store) for reward in getattr(recipe, key)]
        for key in ("rewards", "guardrails")
    }
    # Only what changes: a key that is set counts in the digest of the recipe.
    update: dict[str, Any] = {
        key: rewards for key, rewards in pinned.items() if rewards != getattr(recipe, key)
    }
    branches = {
        name: branch.model_copy(
            update={
                "rewards": [_pin_reward(recipe, reward, with_store) for reward in branch.rewards]
            }
        )
        if branch.rewards
        else branch
        for name, branch in recipe.branches.items()
    }
    if branches != recipe.branches:
        update["branches"] = branches
    return recipe.model_copy(update=update) if update else recipe


def _pin_reward(recipe: Recipe, reward: RewardConfig, with_store: bool) -> RewardConfig:
    if not isinstance(reward, ModelRewardConfig) or not reward.is_registered:
        return reward
    store = reward.store or resolve_tracking_uri(recipe)
    version = find_reward_model(store, reward.uri)
    _require_digest(version, reward.uri, reward.digest)
    update = {"uri": version.uri, "digest": version.digest}
    if with_store:
        update["store"] = store
    return reward.model_copy(update=update)
