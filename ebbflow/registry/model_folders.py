"""The folders of a policy and of its base model, wherever a name on the command line points."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import fsspec

from ebbflow.models.prepare import cache_base_folder
from ebbflow.recipe.base import sanitize_text
from ebbflow.recipe.secrets import redact_secrets
from ebbflow.storage.artifacts import COMMIT
from ebbflow.training.policy_metadata import METADATA, PolicyError, read_policy_metadata


class ModelFolders(NamedTuple):
    """A policy and its base model.

    Attributes:
        name: ``glyph version 3``, or the path of the policy folder.
    """

    base: Path
    policy: Path
    name: str


@contextmanager
def open_model_folders(
    tracking_uri: str, model: str, base: Path | None = None
) -> Iterator[ModelFolders]:
    """Open what ``model`` names: a policy folder, also of a bucket by its URI, ``MODEL``,
    ``MODEL@alias`` or ``MODEL/version``, the last three also behind ``models:/``.

    Args:
        base: folder of the base model, where it is neither stored with a registered version nor in
            the run of the policy folder.

    Raises:
        RegistryError, TrackingError: there is no such version, or it is not what was registered.
        PolicyError: the base model is missing.
    """
    # A download is gone with the block. Not a cache: a version may have gigabytes.
    with tempfile.TemporaryDirectory(prefix="ebbflow-model-") as scratch:
        if "://" in model:
            folder = download_policy(model, Path(scratch) / "policy")
            yield ModelFolders(
                base or _find_base(folder, tracking_uri, Path(scratch)), folder, model
            )
        # A folder wins over a registered model of the same name.
        elif (Path(model) / METADATA).is_file():
            base = base or _find_base(Path(model), tracking_uri, Path(scratch))
            yield ModelFolders(base, Path(model), model)
        else:
            # A policy folder whose base model is named needs no registry, and its imports cost more
            # than a small picture.
            from ebbflow.registry.download import download_registered_data
            from ebbflow.registry.lookup import find_named_version
            from ebbflow.registry.serving import find_base_folder

            version = find_named_version(tracking_uri, model.removeprefix("models:/"))
            data = download_registered_data(tracking_uri, version, Path(scratch))
            name = f"{version.name} version {version.version}"
            yield ModelFolders(base or find_base_folder(data), data / "policy", name)


def download_policy(uri: str, folder: Path) -> Path:
    """Download the policy folder at a URI, such as the one of a run in a bucket.

    Raises:
        PolicyError: there is none, or the store does not answer.
    """
    try:
        store, path = fsspec.core.url_to_fs(uri)
        # With the separator: without it, some stores put the folder itself into ``folder``.
        store.get(f"{path.rstrip('/')}/", f"{folder}/", recursive=True)
    except Exception as error:  # every store has errors of its own
        reason = sanitize_text(redact_secrets(f"{type(error).__name__}: {error}"), 300)
        raise PolicyError(
            f"{redact_secrets(uri)} cannot be downloaded ({reason}); name the policy folder of a"
            " run, and install the package of its store, such as s3fs"
        ) from error
    return folder


def _find_base(policy: Path, tracking_uri: str, scratch: Path) -> Path:
    """Find the base model of a policy folder: in its run, in a registered version, or on the hub.

    Raises:
        PolicyError: it is in none of them.
    """
    metadata = read_policy_metadata(policy)
    # <run>/nodes/<stage>/policy is the policy and <run>/nodes/*/base the base model. Its digest is
    # compared, as a run may have several and the folder may have been moved.
    for commit in sorted(policy.resolve().parents[1].glob(f"*/base/{COMMIT}")):
        if commit.read_text(errors="replace") == metadata.base_digest:
            return commit.parent
    from ebbflow.registry.download import download_registered_data  # imports MLflow
    from ebbflow.registry.lookup import find_version_with_base

    version = find_version_with_base(tracking_uri, metadata.base_digest)
    if version:
        return download_registered_data(tracking_uri, version, scratch) / "base"
    if metadata.model.is_on_hub:
        return cache_base_folder(metadata.model)
    raise PolicyError(
        f"{policy} was trained from base model {metadata.base_digest[:12]}, which is neither in its"
        " run nor in a registered version; give its folder with --base"
    )
