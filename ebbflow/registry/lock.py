"""One promotion at a time: a lock on a registered model, kept as a tag of the version that is to
become champion.

MLflow has no compare-and-swap, but reading and writing one's own tag is enough for the one-bit
algorithm (L. Lamport, "The mutual exclusion problem, part II", J. ACM 33(2), 1986), with lower
version numbers first: set your tag, then look. If a lower version has its tag set, remove yours,
wait until the lower ones are gone and start again; otherwise wait until the higher ones are gone.
No two promotions are ever inside: both set their tags before they looked, so one of them saw the
other's. The docstring of the room compares it with simpler ways.

Example:
    Versions 7 and 8 are promoted at the same time; time goes down::

        7: sets its tag                8: sets its tag
        7: sees 8, which is higher     8: sees 7, which is lower: removes its tag and waits
        7: becomes champion            8: 7 is gone: sets its tag, sees nobody
        7: removes its tag             8: the champion is 7 and not the expected one: rejected
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from ebbflow.recipe.secrets import redact_secrets
from ebbflow.tracking.store import TrackingError, take_first_line

CHAMPION = "champion"
LOCK = "ebbflow.promoting"
TIMEOUT = 60.0
"""Seconds to wait for other promotions, each of which is a handful of requests."""
POLL = 0.1
"""Seconds between two looks at the others' tags."""

logger = logging.getLogger(__name__)


class RegistryLockError(TrackingError):
    """Another promotion of the model is in progress, or took this one over."""


def find_version_by_alias(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    """The version with an alias; None if no version has it or there is no such model."""
    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        # A model that does not exist is the first, an alias that no version has is the second in
        # SQL stores.
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


@contextmanager
def hold_registry_lock(
    client: MlflowClient, name: str, version: str, replaced: str | None
) -> Iterator[Callable[[], None]]:
    """While the body runs, no other version of the model is promoted.

    Yields a function to call right before the first write that matters. It raises if somebody else
    has taken the lock of this version over: a retry of a task whose first attempt was believed
    dead. Leftovers of killed processes are taken over likewise.

    Args:
        replaced: the champion that is to be replaced, for people who find the tag.

    Raises:
        RegistryLockError: others held their locks for ``TIMEOUT`` seconds.
    """
    # The random part tells two attempts at the same version apart. The version number cannot: a
    # retry of a task has the same one.
    token = f"against {replaced or 'no champion'}, {uuid.uuid4().hex}"
    try:
        _acquire_lock(client, name, version, token)
        yield lambda: _check_lock_held(client, name, version, token)
    finally:
        _release_lock(client, name, version, token)


def _acquire_lock(client: MlflowClient, name: str, version: str, token: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    # Set first and look afterwards, each time: the other order would let two promotions in.
    client.set_model_version_tag(name, version, LOCK, token)
    while any(other < int(version) for other in _find_other_holders(client, name, version)):
        # The higher version takes its tag away while it waits, or both would wait for each other.
        client.delete_model_version_tag(name, version, LOCK)
        _wait_for_others(client, name, version, lambda other: other < int(version), deadline)
        client.set_model_version_tag(name, version, LOCK, token)
    _wait_for_others(client, name, version, lambda other: other > int(version), deadline)


def _wait_for_others(
    client: MlflowClient, name: str, version: str, blocks: Callable[[int], bool], deadline: float
) -> None:
    while True:
        holders = _find_other_holders(client, name, version)
        blocking = [other for other in holders if blocks(other)]
        if not blocking:
            return
        if time.monotonic() > deadline:
            raise RegistryLockError(
                f"{name!r} version {version} waited {TIMEOUT:.0f} s for version {blocking[0]},"
                " which is being promoted; nothing was changed. If that promotion was killed, run"
                f" it again, or delete the tag {LOCK!r} of version {blocking[0]} in MLflow's UI."
                " Then run this again"
            )
        time.sleep(POLL)


def _find_other_holders(client: MlflowClient, name: str, version: str) -> set[int]:
    """Find other versions with a lock."""
    # numbers and not strings: "10" < "9"
    tagged = client.search_model_versions(f"name = '{name}' and tags.`{LOCK}` != ''")
    others = {int(other.version) for other in tagged} - {int(version)}
    if not others:
        return others
    # A promotion ends with its version as champion, so the champion's own lock is what a process
    # left that was killed between its last write and the release.
    champion = find_version_by_alias(client, name, CHAMPION)
    if champion is not None and int(champion.version) in others:
        client.delete_model_version_tag(name, str(champion.version), LOCK)
        others.remove(int(champion.version))
    return others


def _check_lock_held(client: MlflowClient, name: str, version: str, token: str) -> None:
    if client.get_model_version(name, version).tags.get(LOCK) != token:
        raise RegistryLockError(
            f"another attempt took over the promotion of {name!r} version {version}, or its tag"
            f" {LOCK!r} was deleted; this attempt changed nothing. See how the other one ended"
            " before you run this again"
        )


def _release_lock(client: MlflowClient, name: str, version: str, token: str) -> None:
    """Never raises: once the champion has moved, the promotion has succeeded; before that, the
    first error says more.
    """
    try:
        # another attempt's token stays: that attempt is inside now
        if client.get_model_version(name, version).tags.get(LOCK) == token:
            client.delete_model_version_tag(name, version, LOCK)
    except Exception as error:
        logger.warning(
            "cannot delete the tag %s of %r version %s; the next promotion, or a retry of this one,"
            " will: %s",
            *(LOCK, name, version, redact_secrets(take_first_line(error))),
        )
