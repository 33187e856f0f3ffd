"""The adoption of a version by a person: the gate of another release decided on it, so that nobody
can decide again by today's rules.

Its files must still be what was registered. What else does not verify is listed in the record, a
tag of the version with who, when and why; ``verify`` then shows those checks as ``adopted``.

Example:
    The tag ``ebbflow.adopted``::

        {"content": "3f9a...", "failed": ["gate", "alias"], "version": "3",
         "when": "2026-11-25T...", "who": "ann@trainer", "why": "champion of release 1"}
"""

from __future__ import annotations

import getpass
import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from ebbflow.recipe.base import Strict
from ebbflow.registry.lock import CHAMPION, find_version_by_alias, hold_registry_lock
from ebbflow.registry.model_version import RegistryError, raise_registry_errors
from ebbflow.registry.promotion import DECISION, PREVIOUS, ROLLED_BACK, record_promotion
from ebbflow.registry.signing import (
    ADOPTED,
    compute_content_digest,
    is_signing_configured,
    require_no_broken_signature,
    require_signing_key,
    sign_version,
)
from ebbflow.tracking.store import connect_to_store
from ebbflow.verification.version import Check

ADOPTED_CHECKS = ("rewards", "training prompts", "gate")
"""Checks that rest on rules and records which another release did not have. The others compare
files with the digests that they were registered with, or the alias, whose record an adoption
writes.
"""


class Adoption(Strict):
    """The record of an adoption.

    Attributes:
        content: the digest of everything that is signed of the version.
        failed: the checks that did not verify.
    """

    version: str
    content: str
    failed: tuple[str, ...]
    who: str
    when: str
    why: str


def find_adoption(version: ModelVersion) -> Adoption | None:
    """Find the adoption of a version as it is now; None where there is none, or where it is of
    another version or of other content.
    """
    try:
        adoption = Adoption.model_validate_json(version.tags.get(ADOPTED, ""))
    except ValueError:
        return None
    named = adoption.version == str(version.version)
    return adoption if named and adoption.content == compute_content_digest(version) else None


def adopt_version(
    tracking_uri: str, version: ModelVersion, checks: Sequence[Check], reason: str
) -> Adoption:
    """Record that a person adopts a version, with its promotion where it is the champion, and sign
    it where a key is configured.

    Args:
        checks: of ``verify_version``.

    Raises:
        RegistryError: there is no reason, nothing has to be adopted, a file is not what was
            registered or signed, the version changed while it was verified, the gate refused it, it
            was rolled back, or a write failed.
    """
    name = version.name
    number = str(version.version)
    failed = [check for check in checks if check.status == "FAILED" and check.name != "signature"]
    _require_adoptable(version, failed, reason)
    require_no_broken_signature(version)
    client = connect_to_store(tracking_uri)
    with (
        raise_registry_errors(
            f"adopt {name!r} version {number}", tracking_uri, "Run the command again"
        ),
        hold_registry_lock(client, name, number, None) as check_held,
    ):
        require_signing_key(f"{name!r} version {number}")
        champion = find_version_by_alias(client, name, CHAMPION)
        check_held()
        adoption = Adoption(
            version=number,
            # Of what was verified: ``verify`` does not honour it for anything else.
            content=compute_content_digest(version),
            failed=tuple(check.name for check in failed),
            who=f"{getpass.getuser()}@{platform.node()}",
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            why=reason.strip(),
        )
        text = json.dumps(adoption.model_dump(), sort_keys=True)
        client.set_model_version_tag(name, number, ADOPTED, text)
        if champion is not None and str(champion.version) == number:
            record_promotion(client, name, number, _find_replaced_version(client, version))
        if is_signing_configured():
            sign_version(client, name, number, verified=version)
    return adoption


def _find_replaced_version(client: MlflowClient, champion: ModelVersion) -> str | None:
    previous = find_version_by_alias(client, champion.name, PREVIOUS)
    if previous is None or previous.version == champion.version:
        return None
    return str(previous.version)


def _require_adoptable(version: ModelVersion, failed: Sequence[Check], reason: str) -> None:
    named = f"{version.name!r} version {version.version}"
    if not reason.strip():
        raise RegistryError(f"the adoption of {named} needs a reason; give --reason")
    if not failed:
        raise RegistryError(f"{named} verifies, so that nothing has to be adopted")
    adoptable = (*ADOPTED_CHECKS, "alias")
    changed = [check for check in failed if check.is_changed or check.name not in adoptable]
    if changed:
        lines = "\n".join(map(str, changed))
        raise RegistryError(f"{named} is not what was registered, and cannot be adopted:\n{lines}")
    decision = version.tags.get(DECISION, "")
    if decision and not decision.startswith('{"promote":true,'):
        raise RegistryError(
            f"the gate refused {named}, which no adoption changes; `ebbflow rollback RECIPE --to"
            f" {version.version}` makes it champion nevertheless"
        )
    rolled_back = version.tags.get(ROLLED_BACK)
    if rolled_back:
        raise RegistryError(
            f"{named} was rolled back ({rolled_back}); `ebbflow rollback RECIPE --to"
            f" {version.version}` makes it champion again"
        )
