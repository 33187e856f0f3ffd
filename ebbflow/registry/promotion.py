"""The model registry: every run's best policy becomes a version, and the gate decides which version
is champion.

Aliases: ``challenger`` is the newest version, ``champion`` the one in use, ``previous`` the one it
replaced. Unlike metrics, no write may get lost here: every failure raises, and a retry ends in the
same state as an undisturbed attempt. Moving the champion is the last write of a promotion, so a
promotion that fails has not happened.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_GIT_COMMIT
from pydantic import ValidationError

from ebbflow.data.records import Evaluation, GateDecision, Registration, TrackedRun
from ebbflow.recipe.gate_policy import GatePolicy
from ebbflow.registry.gate_policy import pin_gate_policy
from ebbflow.registry.lock import CHAMPION, find_version_by_alias, hold_registry_lock
from ebbflow.registry.model_version import (
    POLICY_DIGEST,
    RegistryError,
    check_store_exists,
    create_version,
    find_version,
    link_version_to_run,
    raise_registry_errors,
    require_weights,
)
from ebbflow.registry.signing import (
    PROMOTION,
    attest_registration,
    require_attestation,
    require_signature,
    require_signing_key,
    sign_version,
)
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.formats import VERSION_FORMAT, VERSION_FORMAT_TAG
from ebbflow.tracking.parent_run import UNCOMMITTED
from ebbflow.tracking.store import (
    DIGEST,
    EXECUTION,
    RUN,
    connect_to_store,
)

CHALLENGER = "challenger"
PREVIOUS = "previous"
"""Aliases, besides ``lock.CHAMPION``."""
REPLACES = "ebbflow.replaces"
ROLLED_BACK = "ebbflow.rolled_back"
ANCHORED = "ebbflow.anchored"
"""The tag of a version that a person made champion, with the time: the newest is the anchor that
candidates are compared with, too.
"""
COMPARED_WITH = "ebbflow.compared_with"
DECISION = "ebbflow.decision"
GATE_DIGEST = "ebbflow.gate_digest"
"""Tags of a version."""
NO_CHAMPION = "no champion"
"""The value of ``COMPARED_WITH`` where there was none."""
MAX_TAG_LENGTH = 5000
"""Characters of the tag; databases of older versions of MLflow hold no more."""

logger = logging.getLogger(__name__)


def register_version(
    tracked: TrackedRun,
    policy: Path,
    base: Path | None,
    decision: GateDecision,
    lineage: dict[str, str],
    *,
    model_name: str,
    expected_champion: str | None,
    evidence: Path | None = None,
) -> Registration:
    """Register a run's policy as challenger. Idempotent.

    Args:
        policy: a committed policy folder; what only training reads in it is left out.
        base: the base model's folder, stored with the version so that it can generate by itself,
            unless it is larger than ``model_version.MAX_STORED_BASE``; None leaves it out.
        lineage: further tags, such as ``execution_id`` and ``base_digest``; they get the prefix
            ``ebbflow.`` unless dotted.
        model_name: the registered model.
        expected_champion: the version that the gate compared with; None if there was no champion.
        evidence: the folder that ``evidence.write_evidence`` filled, stored with the version; its
            tags belong into ``lineage``.

    Raises:
        RegistryError: a write failed, or a version that names this run was not made by it.
    """
    client = connect_to_store(tracked.tracking_uri)
    with raise_registry_errors(
        f"register the policy of run {tracked.run_id} as {model_name!r}", tracked.tracking_uri
    ):
        ensure_registered_model(client, model_name)
        # Each step below looks for what an earlier attempt has done: a retry ends in the same
        # state, with one version.
        version = find_version(client, model_name, tracked.run_id)
        if version is None:
            tags = _build_version_tags(client, tracked, decision, lineage, expected_champion)
            version = create_version(
                client,
                tracked,
                policy,
                base,
                model_name,
                tags,
                evidence,
                attest=partial(attest_registration, model_name, tracked.run_id),
            )
            logger.info("registered %r version %s", model_name, version.version)
        # A version that merely names this run may be anybody's: it must not be signed.
        require_attestation(version, tracked.run_id)
        # Again on a retry, whose first attempt may have died between the two.
        sign_version(client, model_name, str(version.version), verified=version)
        link_version_to_run(client, tracked, version)
        _set_challenger(client, model_name, version)
        return _read_registration(client, model_name, str(version.version))


def promote_version(
    tracked: TrackedRun,
    registration: Registration,
    tags: dict[str, str],
    *,
    expected_champion: str | None,
    gate_policy: GatePolicy | None = None,
) -> Registration:
    """Make a registered version champion. Idempotent; of several concurrent promotions one wins.

    Args:
        tags: further tags of the version about its promotion; they get the prefix ``ebbflow.``
            unless dotted.
        expected_champion: the version that the gate compared with; None if there was no champion.
        gate_policy: the rules that the version has passed, which the first promotion pins to the
            model; None pins none.

    Raises:
        RegistryError: a write failed, the champion is no longer the one that the gate compared
            with, the model's gate policy asks for more than the version has passed, the version
            has been rolled back, or its weights were deleted. The champion stays, unless the last
            write's answer was lost.
        RegistryLockError: another promotion of the model did not end.
    """
    client = connect_to_store(tracked.tracking_uri)
    name = registration.model_name
    version = registration.version
    with (
        raise_registry_errors(f"make {name!r} version {version} champion", tracked.tracking_uri),
        hold_registry_lock(client, name, version, expected_champion) as check_held,
    ):
        # Read again under the lock: hours may lie between the gate and the approval.
        champion = _find_champion_version(client, name)
        # An earlier attempt succeeded, and its answer was lost.
        if champion == version:
            return _read_registration(client, name, version)
        if champion != expected_champion:
            raise RegistryError(
                f"{name!r} version {version} was compared with champion"
                f" {expected_champion or '(none)'}, but the champion is now {champion or '(none)'};"
                " it stays challenger. To compare it with that one, start a new execution"
                f" (locally, delete {tracked.folder} first)"
            )
        # After a rollback the expected champion is champion again, so the check above passes: a
        # retried task would silently undo what a person decided.
        registered = client.get_model_version(name, version)
        # A retention may have deleted them while a person thought about approval.
        require_weights(registered)
        require_signature(registered)
        _require_no_rollback(registered)
        require_signing_key(f"{name!r} version {version}")
        # before the tags of the promotion, which an attempt that has lost its lock must not write
        check_held()
        if gate_policy is not None:  # it may have changed while a person thought about approval
            pin_gate_policy(client, name, gate_policy, f"the promotion of version {version}")
        for key, value in _prefix_tags(tags).items():
            client.set_model_version_tag(name, version, key, value)
        return _move_champion(client, name, champion, version, check_held)


def _require_no_rollback(registered: ModelVersion) -> None:
    rolled_back = registered.tags.get(ROLLED_BACK)
    if rolled_back:
        raise RegistryError(
            f"{registered.name!r} version {registered.version} has been rolled back"
            f" ({rolled_back}), which a retry does not undo; to promote it, run `ebbflow rollback"
            f" RECIPE --to {registered.version}`"
        )


def decline_version(
    tracked: TrackedRun, registration: Registration, tags: dict[str, str]
) -> Registration:
    """Record that a person did not approve a registered version: it stays challenger. Idempotent.

    Args:
        tags: of the version, as in ``promote_version``.

    Raises:
        RegistryError: a write failed.
    """
    client = connect_to_store(tracked.tracking_uri)
    name = registration.model_name
    version = registration.version
    with raise_registry_errors(f"tag {name!r} version {version}", tracked.tracking_uri):
        for key, value in _prefix_tags(tags).items():
            client.set_model_version_tag(name, version, key, value)
    return registration.model_copy(update={"declined": True})


def roll_back_champion(tracking_uri: str, model_name: str, to: str | None = None) -> Registration:
    """Make the previous champion, or version ``to``, champion again; the current champion becomes
    ``previous``. A version that a person names with ``to`` becomes the anchor.

    Raises:
        RegistryError: without ``to`` there is no champion or no previous one; there is no such
            version, its weights were deleted, it is champion already, the champion moved in the
            meantime, or a write failed.
        RegistryLockError: a promotion of the model did not end.
    """
    check_store_exists(tracking_uri)
    client = connect_to_store(tracking_uri)
    with raise_registry_errors(f"roll {model_name!r} back", tracking_uri, "Run the command again"):
        champion, version = _find_rollback_versions(client, model_name, to)
        with hold_registry_lock(client, model_name, version, champion) as check_held:
            # the versions were looked up without the lock, as the lock needs one of them
            current = _find_champion_version(client, model_name)
            if current != champion:
                raise RegistryError(
                    f"the champion of {model_name!r} was {champion} and is now"
                    f" {current or '(none)'}; nothing was rolled back. Run the command again to"
                    " roll back the new one"
                )
            # The rollback signs the version anew, so what is signed must be what was registered.
            registered = client.get_model_version(model_name, version)
            require_weights(registered)
            require_signature(registered)
            require_signing_key(f"{model_name!r} version {version}")
            check_held()
            # before the champion moves, or a retry of its promotion could come in between
            note = f"to version {version}, {datetime.now(UTC).isoformat(timespec='seconds')}"
            if champion is not None:
                client.set_model_version_tag(model_name, champion, ROLLED_BACK, note)
            # A person wants this version again, so that it is rolled back no more.
            if ROLLED_BACK in client.get_model_version(model_name, version).tags:
                client.delete_model_version_tag(model_name, version, ROLLED_BACK)
            if to is not None:
                anchored = datetime.now(UTC).isoformat()
                client.set_model_version_tag(model_name, to, ANCHORED, anchored)
            return _move_champion(client, model_name, champion, version, check_held)


def ensure_registered_model(client: MlflowClient, name: str) -> None:
    try:
        client.create_registered_model(
            name, description="Policies post-trained by Ebbflow; the gate moves the alias champion."
        )
    except MlflowException as error:
        # there is no "create if missing", and asking first would race
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _build_version_tags(
    client: MlflowClient,
    tracked: TrackedRun,
    decision: GateDecision,
    lineage: dict[str, str],
    expected_champion: str | None,
) -> dict[str, str]:
    run_tags = client.get_run(tracked.run_id).data.tags
    execution = {EXECUTION: run_tags[EXECUTION]} if EXECUTION in run_tags else {}
    # Of the code that trained: the run's own tags go when somebody deletes the run.
    source = {
        key: run_tags[tag]
        for key, tag in (("ebbflow.git_commit", MLFLOW_GIT_COMMIT), (UNCOMMITTED, UNCOMMITTED))
        if tag in run_tags
    }
    gate = {
        COMPARED_WITH: expected_champion or NO_CHAMPION,
        DECISION: format_decision_tag(decision),
    }
    return {
        **_prefix_tags(lineage),
        **execution,
        **source,
        **gate,
        RUN: tracked.run_id,
        DIGEST: tracked.recipe_digest,
        VERSION_FORMAT_TAG: str(VERSION_FORMAT),
    }


def _prefix_tags(tags: dict[str, str]) -> dict[str, str]:
    return {key if "." in key else f"ebbflow.{key}": value for key, value in tags.items()}


def format_decision_tag(decision: GateDecision) -> str:
    """The decision as the value of a tag, which is cut off where it is too long for one."""
    text = decision.model_dump_json()
    if len(text) > MAX_TAG_LENGTH:
        # Too many guardrails for a tag. The reasons repeat the numbers, so they are dropped first.
        text = decision.model_dump_json(exclude={"reasons"})[:MAX_TAG_LENGTH]
    return text


def says_decision(tag: str, decision: GateDecision) -> bool:
    """Return whether the value of a tag, also of an earlier Ebbflow, says this decision: its text
    lacks the fields that came later, whose defaults say the same.
    """
    if tag == format_decision_tag(decision):
        return True
    try:
        return GateDecision.model_validate_json(tag) == decision
    except ValidationError:
        return False  # what was cut off is compared as text


def describe_promotion(version: str, replaced: str | None, tags: Mapping[str, str]) -> str:
    """Return the record of a promotion or a rollback, the value of the tag ``PROMOTION``. It names
    the version and its digests: copied to another version, it does not fit.
    """
    record = {
        "version": version,
        "replaces": replaced or "",
        "policy_digest": tags.get(POLICY_DIGEST, ""),
        "gate_digest": tags.get(GATE_DIGEST, ""),
    }
    return json.dumps(record, sort_keys=True)


def require_evaluated_policy(policy: Path, evaluation: Evaluation) -> None:
    """Check that a policy folder is the one that was evaluated.

    Raises:
        RegistryError: it is another.
    """
    digest = verify_folder(policy)
    if digest != evaluation.policy_digest:
        raise RegistryError(
            f"{policy} has the digest {digest[:12]}, and the evaluation {evaluation.label!r} is of"
            f" {evaluation.policy_digest[:12] or '(unknown)'}; register the policy that was"
            " evaluated"
        )


def _set_challenger(client: MlflowClient, name: str, version: ModelVersion) -> None:
    """Make a version challenger unless a newer one is: a late retry must not take the alias from
    it.
    """
    challenger = find_version_by_alias(client, name, CHALLENGER)
    if challenger is None or int(challenger.version) < int(version.version):
        client.set_registered_model_alias(name, CHALLENGER, version.version)


def _find_rollback_versions(
    client: MlflowClient, name: str, to: str | None
) -> tuple[str | None, str]:
    """(the champion, None if it was deleted by hand; the version that replaces it)."""
    champion = find_version_by_alias(client, name, CHAMPION)
    version = to or (_find_previous_champion(client, name, champion) if champion else None)
    if version is None:
        problem = (
            f"version {champion.version} is champion and replaced none"
            if champion
            else "has no champion: it has none yet, or the version was deleted by hand"
        )
        raise RegistryError(
            f"{name!r} {problem}; name the version that shall be champion with --to. Versions:"
            f" {_list_known_versions(client, name)}"
        )
    if champion and version == str(champion.version):
        raise RegistryError(
            f"{name!r} version {version} is the champion already; nothing was changed"
        )
    try:
        client.get_model_version(name, version)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        known = _list_known_versions(client, name)
        raise RegistryError(
            f"{name!r} has no version {version}; give one with --to, such as {known}"
        ) from error
    return str(champion.version) if champion else None, version


def _list_known_versions(client: MlflowClient, name: str) -> str:
    """List the newest versions of a model for an error; "previous" marks the one with the alias."""
    previous = find_version_by_alias(client, name, PREVIOUS)
    numbers = sorted(
        int(version.version) for version in client.search_model_versions(f"name = '{name}'")
    )
    marked = [
        f"{number} (previous)" if previous and number == int(previous.version) else str(number)
        for number in numbers[-10:]
    ]
    return ", ".join(marked) or "none; check promotion.model_name and the MLflow store"


def _find_previous_champion(client: MlflowClient, name: str, champion: ModelVersion) -> str | None:
    """The previous champion; the champion's tag knows it if an interrupted promotion has already
    moved ``previous``.
    """
    previous = find_version_by_alias(client, name, PREVIOUS)
    if previous is not None and previous.version != champion.version:
        return str(previous.version)
    return champion.tags.get(REPLACES) or None


def record_promotion(client: MlflowClient, name: str, version: str, replaced: str | None) -> None:
    """Write the tags of a version that becomes, or is, champion."""
    # The tag first: killed after it, a retry overwrites it. Killed after PREVIOUS has moved, the
    # tag of the champion still knows the version before it (_find_previous_champion).
    client.set_model_version_tag(name, version, REPLACES, replaced or "")
    tags = client.get_model_version(name, version).tags
    record = describe_promotion(version, replaced, tags)
    client.set_model_version_tag(name, version, PROMOTION, record)


def _move_champion(
    client: MlflowClient,
    name: str,
    champion: str | None,
    version: str,
    check_held: Callable[[], None],
) -> Registration:
    """The writes of a promotion, the decisive one last. The caller holds the lock."""
    record_promotion(client, name, version, champion)
    sign_version(client, name, version)
    if champion is not None:
        client.set_registered_model_alias(name, PREVIOUS, champion)
    # As late as possible. Between this check and the write nothing protects the champion, which is
    # the limit that docs/promotion.md names.
    check_held()
    client.set_registered_model_alias(name, CHAMPION, version)
    logger.info("champion of %r is now version %s (before: %s)", name, version, champion or "none")
    return Registration(model_name=name, version=version, champion=True, previous=champion)


def _read_registration(client: MlflowClient, name: str, version: str) -> Registration:
    champion = find_version_by_alias(client, name, CHAMPION)
    if champion is None or str(champion.version) != version:
        return Registration(model_name=name, version=version, champion=False, previous=None)
    return Registration(
        model_name=name,
        version=version,
        champion=True,
        previous=champion.tags.get(REPLACES) or None,
    )


def _find_champion_version(client: MlflowClient, name: str) -> str | None:
    champion = find_version_by_alias(client, name, CHAMPION)
    return str(champion.version) if champion else None
