"""Versions as files: downloaded, and compared with the digests that were registered before anything
in them is used.
"""

from __future__ import annotations

from pathlib import Path

import mlflow.artifacts
import mlflow.pyfunc
from mlflow.entities.model_registry import ModelVersion
from mlflow.models import Model

from ebbflow.data.records import Champion
from ebbflow.registry.lock import CHAMPION
from ebbflow.registry.model_version import (
    BASE_DIGEST,
    BASE_STORED,
    POLICY_DIGEST,
    RegistryError,
    raise_registry_errors,
    require_weights,
)
from ebbflow.registry.signing import require_signature
from ebbflow.storage.artifacts import ArtifactError, verify_folder
from ebbflow.storage.disk import safe_join
from ebbflow.tracking.store import connect_to_store
from ebbflow.training.policy_metadata import METADATA


def download_version(tracking_uri: str, name: str, version: str, into: Path) -> Path:
    """Download a version as MLflow stored it. Returns the folder that has the file ``MLmodel``.
    Nothing is checked: ``ebbflow verify`` looks at what is there.
    """
    client = connect_to_store(tracking_uri)
    with raise_registry_errors(f"download {name!r} version {version}", tracking_uri):
        # not "models:/<name>/<version>", which MLflow resolves in the process-wide registry
        uri = client.get_model_version_download_uri(name, version)
        return Path(
            mlflow.artifacts.download_artifacts(uri, dst_path=str(into), tracking_uri=tracking_uri)
        )


def download_registered_data(tracking_uri: str, version: ModelVersion, into: Path) -> Path:
    """Download a version to use it. Returns the folder that has ``policy/`` and, where it was
    stored, ``base/``.

    Raises:
        RegistryError: it is not what was registered, or not signed where a key is configured.
    """
    require_weights(version)
    model = download_version(tracking_uri, version.name, str(version.version), into)
    data = find_data_folder(model)
    require_registered_folders(version, data)
    return data


def find_data_folder(model: Path) -> Path:
    """The folder of a downloaded version that has ``policy/`` and, where it was stored,
    ``base/``."""
    flavor = Model.load(str(model)).flavors.get(mlflow.pyfunc.FLAVOR_NAME, {})
    return safe_join(model, flavor.get(mlflow.pyfunc.DATA, "data"))


def require_registered_folders(version: ModelVersion, data: Path, promoted: bool = False) -> None:
    """Check that policy and base model of a version are those that were registered, by its tags,
    and its signature where a key is configured.

    Args:
        data: the folder that has ``policy/`` and, where it was stored, ``base/``.
        promoted: whether it is used as a champion, whose promotion must be signed as well.

    Raises:
        SignatureError: it is not signed as it should be.
        RegistryError: a folder is another, or was changed.
    """
    require_signature(version, promoted)
    named = f"{version.name!r} version {version.version}"
    expected = version.tags.get(POLICY_DIGEST)
    if not expected:
        raise RegistryError(
            f"{named} has no tag {POLICY_DIGEST}, so nothing says which policy was registered; use"
            " another version"
        )
    _require_digest(f"the policy of {named}", data / "policy", expected)
    base_digest = version.tags.get(BASE_DIGEST)
    if (data / "base").is_dir() and base_digest:
        _require_digest(f"the base model of {named}", data / "base", base_digest)
    if version.tags.get(BASE_STORED) == "true" and not (data / "base").is_dir():
        raise RegistryError(f"{named} was registered with its base model, which is missing")


def _require_digest(what: str, folder: Path, expected: str) -> None:
    try:
        digest = verify_folder(folder)
    except ArtifactError as error:
        raise RegistryError(f"{what} is damaged: {error}") from error
    if digest != expected:
        raise RegistryError(
            f"{what} is not what was registered: its digest is {digest[:12]}, and the version's tag"
            f" says {expected[:12]}; do not use it, and find out who changed it"
        )


def download_champion(champion: Champion, into: Path) -> Path:
    """Download this very version, even if another has become champion since. Returns the folder
    that has ``policy/``.

    Raises:
        RegistryError: Ebbflow did not register it, or it is not what was registered.
    """
    name = champion.model_name
    with raise_registry_errors(
        f"look up {name!r} version {champion.version}", champion.tracking_uri
    ):
        version = connect_to_store(champion.tracking_uri).get_model_version(name, champion.version)
    require_weights(version)
    data = find_data_folder(download_version(champion.tracking_uri, name, champion.version, into))
    if not (data / "policy" / METADATA).is_file():
        raise RegistryError(
            f"{name!r} version {champion.version} has no policy/{METADATA}, so"
            f" Ebbflow did not register it; move the alias {CHAMPION!r} to a version of Ebbflow's,"
            " or delete the alias"
        )
    require_registered_folders(version, data, promoted=True)
    return data


def download_champion_folders(champion: Champion, into: Path, base: Path) -> tuple[Path, Path]:
    """(base-model folder, policy folder) of a champion: its own base if it was stored with the
    version, else ``base``.

    Raises:
        RegistryError: it was trained from another base, which was not stored, or is not what was
            registered.
    """
    data = download_champion(champion, into)
    if (data / "base").is_dir():
        return data / "base", data / "policy"
    # The champion is drawn beside the candidate: with another base model the two would differ by
    # more than the training.
    digest = verify_folder(base)
    if champion.base_digest != digest:
        raise RegistryError(
            f"{champion.model_name!r} version {champion.version} was trained from base model"
            f" {champion.base_digest[:12] or '(unknown)'}, this run from {digest[:12]}; set another"
            " promotion.model_name"
        )
    return base, data / "policy"
