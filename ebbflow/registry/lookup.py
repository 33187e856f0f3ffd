"""Finding versions in the registry: the champion, the anchor, and what a person names."""

from __future__ import annotations

import re

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from ebbflow.data.records import Champion
from ebbflow.registry.lock import CHAMPION, find_version_by_alias
from ebbflow.registry.model_version import (
    BASE_DIGEST,
    BASE_STORED,
    CLEANED,
    RegistryError,
    check_store_exists,
    raise_registry_errors,
)
from ebbflow.registry.promotion import ANCHORED, DECISION, ROLLED_BACK
from ebbflow.tracking.store import DIGEST, RUN, connect_to_store


def find_champion(tracking_uri: str, model_name: str) -> Champion | None:
    """The champion of a registered model; None if the model does not exist yet or has none."""
    with raise_registry_errors(f"look up the champion of {model_name!r}", tracking_uri):
        version = find_version_by_alias(connect_to_store(tracking_uri), model_name, CHAMPION)
    return _describe_version(tracking_uri, version) if version else None


def find_anchor(tracking_uri: str, model_name: str) -> Champion | None:
    """Find the last version that a person approved or made champion with ``ebbflow rollback --to``
    and that is not rolled back; None if there is none.
    """
    with raise_registry_errors(f"look up the anchor of {model_name!r}", tracking_uri):
        versions = connect_to_store(tracking_uri).search_model_versions(
            f"name = '{model_name}' and tags.`{ANCHORED}` != ''"
        )
        # A rollback that is undone by another one brings the anchor back, so its tag stays.
        valid = [version for version in versions if ROLLED_BACK not in version.tags]
        newest = max(valid, key=lambda one: one.tags[ANCHORED], default=None)
    return _describe_version(tracking_uri, newest) if newest else None


def _describe_version(tracking_uri: str, version: ModelVersion) -> Champion:
    decision = version.tags.get(DECISION, "")
    # A long decision is cut to the length of a tag and no longer whole JSON: read its beginning.
    promoted_reward = re.search(r'"target":\{[^}]*"candidate":(-?[0-9.e+-]+)', decision)
    return Champion(
        tracking_uri=tracking_uri,
        model_name=version.name,
        version=str(version.version),
        # a version that a user registered by hand has none of the tags
        run_id=version.tags.get(RUN, version.run_id or ""),
        recipe_digest=version.tags.get(DIGEST, ""),
        base_digest=version.tags.get(BASE_DIGEST, ""),
        promoted_reward=float(promoted_reward[1]) if promoted_reward else None,
    )


def find_named_version(tracking_uri: str, named: str) -> ModelVersion:
    """Find the version that ``MODEL``, ``MODEL@alias`` or ``MODEL/version`` names; a model alone
    means its champion.

    Example:
        ::

            find_named_version(uri, "glyph")             # its champion
            find_named_version(uri, "glyph@challenger")  # the newest version
            find_named_version(uri, "glyph/7")           # version 7

    Raises:
        RegistryError: there is no such version, or no such store.
    """
    check_store_exists(tracking_uri)
    client = connect_to_store(tracking_uri)
    name, _, number = named.partition("/")
    name, _, alias = name.partition("@")
    with raise_registry_errors(f"look up {named!r}", tracking_uri, "Run the command again"):
        if number and alias:
            raise RegistryError(
                f"{named!r} names a version in two ways; give MODEL@alias or MODEL/version"
            )
        if not number:
            version = find_version_by_alias(client, name, alias or CHAMPION)
            if version is None:
                wanted = alias or CHAMPION
                raise RegistryError(
                    f"no version of {name!r} has the alias {wanted!r}; give MODEL@alias or"
                    " MODEL/version"
                )
            return version
        try:
            return client.get_model_version(name, number)
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            raise RegistryError(
                f"there is no version {number!r} of {name!r}; give MODEL@alias or MODEL/version"
            ) from error


def find_version_with_base(tracking_uri: str, base_digest: str) -> ModelVersion | None:
    """Find a version of any model that was registered with this base model; None if there is none,
    or no such store.
    """
    try:
        check_store_exists(tracking_uri)
    except RegistryError:
        return None
    with raise_registry_errors(
        f"look up base model {base_digest[:12]}", tracking_uri, "Run the command again"
    ):
        wanted = f"tags.`{BASE_DIGEST}` = '{base_digest}' and tags.`{BASE_STORED}` = 'true'"
        versions = connect_to_store(tracking_uri).search_model_versions(wanted)
        return next((version for version in versions if CLEANED not in version.tags), None)
