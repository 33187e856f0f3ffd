"""One promotion at a time: a claim on a registered model, kept as a tag of the version that is to become champion.

MLflow has no compare-and-swap, but reading and writing one's own tag is enough for the one-bit algorithm (L. Lamport, "The mutual
exclusion problem, part II", J. ACM 33(2), 1986), lower version numbers first: set your tag, then look. When a lower version has
its tag set, take yours back, wait until the lower ones are gone and begin again; otherwise wait until the higher ones are gone.
No two are ever in: both set their tags before they looked, so one of them saw the other's.
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

from ebbflow.recipe.secrets import redact
from ebbflow.tracking.store import TrackingError

CHAMPION = "champion"
CLAIM = "ebbflow.promoting"
PATIENCE = 60.0
"""Seconds that a claim waits for others: a promotion is a handful of requests."""
POLL = 0.1

log = logging.getLogger(__name__)


class ClaimError(TrackingError):
    """Another promotion of the model is under way, or took this one over."""


def alias_of(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    """The version that holds an alias; None when no version does, or there is no such model."""
    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        # SQL stores say INVALID_PARAMETER_VALUE for an alias that no version holds
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


@contextmanager
def registry_lock(client: MlflowClient, name: str, version: str, against: str | None) -> Iterator[Callable[[], None]]:
    """While the body runs, no other version of the model is being made champion.

    Yields a function to call right before the first write that matters: it raises when somebody else works for this version in
    the meantime. That is a retry of a task whose first attempt was believed dead; the retry takes the claim over. A claim that a
    killed process left behind is taken over in the same way.

    Args:
        against: the champion that is to be replaced, for people who find the tag.

    Raises:
        ClaimError: others held their claims for ``PATIENCE`` seconds.
    """
    mine = f"against {against or 'no champion'}, {uuid.uuid4().hex}"
    try:
        _enter(client, name, version, mine)
        yield lambda: _require(client, name, version, mine)
    finally:
        _leave(client, name, version, mine)


def _enter(client: MlflowClient, name: str, version: str, mine: str) -> None:
    deadline = time.monotonic() + PATIENCE
    client.set_model_version_tag(name, version, CLAIM, mine)
    while any(other < int(version) for other in _others(client, name, version)):
        client.delete_model_version_tag(name, version, CLAIM)
        _wait(client, name, version, lambda other: other < int(version), deadline)
        client.set_model_version_tag(name, version, CLAIM, mine)
    _wait(client, name, version, lambda other: other > int(version), deadline)


def _wait(client: MlflowClient, name: str, version: str, in_the_way: Callable[[int], bool], deadline: float) -> None:
    while found := [other for other in _others(client, name, version) if in_the_way(other)]:
        if time.monotonic() > deadline:
            raise ClaimError(
                f"{name!r} version {version} waited {PATIENCE:.0f} s for version {found[0]}, which is being made champion, and "
                f"changed nothing. If what promotes version {found[0]} was killed, run that task or command again; if it is gone "
                f"for good, delete the tag {CLAIM!r} of version {found[0]} (on its page in MLflow). Then run this again"
            )
        time.sleep(POLL)


def _others(client: MlflowClient, name: str, version: str) -> set[int]:
    """Other versions with a claim. A claim ends when its version is champion: what a champion still holds is a leftover."""
    found = client.search_model_versions(f"name = '{name}' and tags.`{CLAIM}` != ''")
    others = {int(other.version) for other in found} - {int(version)}
    if others and (champion := alias_of(client, name, CHAMPION)) and int(champion.version) in others:
        client.delete_model_version_tag(name, str(champion.version), CLAIM)
        others.remove(int(champion.version))
    return others


def _require(client: MlflowClient, name: str, version: str, mine: str) -> None:
    if client.get_model_version(name, version).tags.get(CLAIM) != mine:
        raise ClaimError(
            f"another attempt took over making {name!r} version {version} champion, or somebody deleted its tag {CLAIM!r}; this "
            "one changed nothing. Look at what became of the other before you run this again"
        )


def _leave(client: MlflowClient, name: str, version: str, mine: str) -> None:
    """Never raises: after the champion moved, nothing may call the promotion failed; before, the first error says more."""
    try:
        if client.get_model_version(name, version).tags.get(CLAIM) == mine:
            client.delete_model_version_tag(name, version, CLAIM)
    except Exception as error:
        log.warning(
            "the tag %s of %r version %s could not be deleted; the next promotion takes it from a champion, a retry of this one "
            "from any other version: %s",
            *(CLAIM, name, version, redact(str(error))),
        )
