"""The model registry: every run's best policy becomes a version, and the gate decides which version
is champion.

Aliases: ``challenger`` is the newest version, ``champion`` the one in use, ``previous`` the one it
replaced. Unlike metrics, no write may get lost here: every failure raises, and a retry ends in the
same state as an undisturbed attempt. Moving the champion is the last write of a promotion, so a
promotion that fails has not happened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import mlflow.artifacts
import mlflow.pyfunc
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import Model

from ebbflow.data.records import Champion, GateDecision, Registration, TrackedRun
from ebbflow.recipe.secrets import redact_secrets
from ebbflow.registry.lock import CHAMPION, find_version_by_alias, hold_registry_lock
from ebbflow.registry.model_version import (
    BASE_STORED,
    RegistryError,
    create_version,
    find_version,
    link_version_to_run,
)
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.disk import safe_join
from ebbflow.tracking.store import (
    DIGEST,
    EXECUTION,
    RUN,
    TrackingError,
    connect_to_store,
    find_sqlite_file,
)
from ebbflow.training.policy_metadata import METADATA

CHALLENGER = "challenger"
PREVIOUS = "previous"
"""Aliases, besides ``lock.CHAMPION``."""
BASE_DIGEST = "ebbflow.base_digest"
REPLACES = "ebbflow.replaces"
ROLLED_BACK = "ebbflow.rolled_back"
COMPARED_WITH = "ebbflow.compared_with"
DECISION = "ebbflow.decision"
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
        RegistryError: a write failed.
    """
    client = connect_to_store(tracked.tracking_uri)
    with _raise_registry_errors(
        f"register the policy of run {tracked.run_id} as {model_name!r}", tracked.tracking_uri
    ):
        _ensure_registered_model(client, model_name)
        # Each step below looks for what an earlier attempt has done: a retry ends in the same
        # state, with one version.
        version = find_version(client, model_name, tracked.run_id)
        if version is None:
            tags = _build_version_tags(client, tracked, decision, lineage, expected_champion)
            version = create_version(client, tracked, policy, base, model_name, tags, evidence)
            logger.info("registered %r version %s", model_name, version.version)
        link_version_to_run(client, tracked, version)
        _set_challenger(client, model_name, version)
        return _read_registration(client, model_name, str(version.version))


def promote_version(
    tracked: TrackedRun,
    registration: Registration,
    tags: dict[str, str],
    *,
    expected_champion: str | None,
) -> Registration:
    """Make a registered version champion. Idempotent; of several concurrent promotions one wins.

    Args:
        tags: further tags of the version about its promotion; they get the prefix ``ebbflow.``
            unless dotted.
        expected_champion: the version that the gate compared with; None if there was no champion.

    Raises:
        RegistryError: a write failed, the champion is no longer the one that the gate compared
            with, or the version was champion and has been rolled back. The champion has not moved,
            unless the answer to the very last write was lost.
        RegistryLockError: another promotion of the model did not end.
    """
    client = connect_to_store(tracked.tracking_uri)
    name = registration.model_name
    version = registration.version
    with (
        _raise_registry_errors(f"make {name!r} version {version} champion", tracked.tracking_uri),
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
        rolled_back = client.get_model_version(name, version).tags.get(ROLLED_BACK)
        if rolled_back:
            raise RegistryError(
                f"{name!r} version {version} has been rolled back ({rolled_back}), which a retry"
                f" does not undo; to promote it, run `ebbflow rollback RECIPE --to {version}`"
            )
        # before the tags of the promotion, which an attempt that has lost its lock must not write
        check_held()
        for key, value in _prefix_tags(tags).items():
            client.set_model_version_tag(name, version, key, value)
        return _move_champion(client, name, champion, version, check_held)


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
    with _raise_registry_errors(f"tag {name!r} version {version}", tracked.tracking_uri):
        for key, value in _prefix_tags(tags).items():
            client.set_model_version_tag(name, version, key, value)
    return registration.model_copy(update={"declined": True})


def roll_back_champion(tracking_uri: str, model_name: str, to: str | None = None) -> Registration:
    """Make the previous champion, or version ``to``, champion again; the current champion becomes
    ``previous``.

    Raises:
        RegistryError: there is no champion, no previous one or no such version, it is champion
            already, the champion moved in the meantime, or a write failed.
        RegistryLockError: a promotion of the model did not end.
    """
    check_store_exists(tracking_uri)
    client = connect_to_store(tracking_uri)
    with _raise_registry_errors(f"roll {model_name!r} back", tracking_uri, "Run the command again"):
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
            check_held()
            # before the champion moves, or a retry of its promotion could come in between
            note = f"to version {version}, {datetime.now(UTC).isoformat(timespec='seconds')}"
            client.set_model_version_tag(model_name, champion, ROLLED_BACK, note)
            return _move_champion(client, model_name, champion, version, check_held)


def find_champion(tracking_uri: str, model_name: str) -> Champion | None:
    """The champion of a registered model; None if the model does not exist yet or has none."""
    with _raise_registry_errors(f"look up the champion of {model_name!r}", tracking_uri):
        version = find_version_by_alias(connect_to_store(tracking_uri), model_name, CHAMPION)
    if version is None:
        return None
    return Champion(
        tracking_uri=tracking_uri,
        model_name=model_name,
        version=str(version.version),
        # a version that a user registered by hand has none of the tags
        run_id=version.tags.get(RUN, version.run_id or ""),
        recipe_digest=version.tags.get(DIGEST, ""),
        base_digest=version.tags.get(BASE_DIGEST, ""),
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
    with _raise_registry_errors(f"look up {named!r}", tracking_uri, "Run the command again"):
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
    with _raise_registry_errors(
        f"look up base model {base_digest[:12]}", tracking_uri, "Run the command again"
    ):
        wanted = f"tags.`{BASE_DIGEST}` = '{base_digest}' and tags.`{BASE_STORED}` = 'true'"
        versions = connect_to_store(tracking_uri).search_model_versions(wanted, max_results=1)
        return versions[0] if versions else None


def download_version(tracking_uri: str, name: str, version: str, into: Path) -> Path:
    """Download a version as MLflow stored it. Returns the folder that has the file ``MLmodel``."""
    client = connect_to_store(tracking_uri)
    with _raise_registry_errors(f"download {name!r} version {version}", tracking_uri):
        # not "models:/<name>/<version>", which MLflow resolves in the process-wide registry
        uri = client.get_model_version_download_uri(name, version)
        return Path(
            mlflow.artifacts.download_artifacts(uri, dst_path=str(into), tracking_uri=tracking_uri)
        )


def find_data_folder(model: Path) -> Path:
    """The folder of a downloaded version that has ``policy/`` and, where it was stored,
    ``base/``."""
    flavor = Model.load(str(model)).flavors.get(mlflow.pyfunc.FLAVOR_NAME, {})
    return safe_join(model, flavor.get(mlflow.pyfunc.DATA, "data"))


def download_champion(champion: Champion, into: Path) -> Path:
    """Download this very version, even if another has become champion since. Returns the folder
    that has ``policy/``.
    """
    data = find_data_folder(
        download_version(champion.tracking_uri, champion.model_name, champion.version, into)
    )
    if not (data / "policy" / METADATA).is_file():
        raise RegistryError(
            f"{champion.model_name!r} version {champion.version} has no policy/{METADATA}, so"
            f" Ebbflow did not register it; move the alias {CHAMPION!r} to a version of Ebbflow's,"
            " or delete the alias"
        )
    return data


def download_champion_folders(champion: Champion, into: Path, base: Path) -> tuple[Path, Path]:
    """(base-model folder, policy folder) of a champion: its own base if it was stored with the
    version, else ``base``.

    Raises:
        RegistryError: it was trained from another base, which was not stored.
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


def check_store_exists(tracking_uri: str) -> None:
    """Check that a SQLite store exists: a client would make an empty one.

    Raises:
        RegistryError: it does not.
    """
    database = find_sqlite_file(tracking_uri)
    if database and not database.is_file():
        raise RegistryError(
            f"no MLflow store at {tracking_uri}; run this where the pipeline ran, or set"
            " tracking.uri"
        )


@contextmanager
def _raise_registry_errors(
    what: str, uri: str, fix: str = "Run the task again: it resumes"
) -> Iterator[None]:
    """Turn whatever the store raises into one error that says what was being done."""
    try:
        yield
    # which already say what was done; RegistryError is one
    except TrackingError:
        raise
    # MLflow, requests and SQLAlchemy raise types of their own; any of them means that the write may
    # not have happened
    except Exception as error:
        raise RegistryError(
            f"could not {what} in {redact_secrets(uri)}: {redact_secrets(str(error))}. {fix}"
        ) from error


def _ensure_registered_model(client: MlflowClient, name: str) -> None:
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
    gate = {
        COMPARED_WITH: expected_champion or NO_CHAMPION,
        DECISION: format_decision_tag(decision),
    }
    return {
        **_prefix_tags(lineage),
        **execution,
        **gate,
        RUN: tracked.run_id,
        DIGEST: tracked.recipe_digest,
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


def _set_challenger(client: MlflowClient, name: str, version: ModelVersion) -> None:
    """Make a version challenger unless a newer one is: a late retry must not take the alias from
    it.
    """
    challenger = find_version_by_alias(client, name, CHALLENGER)
    if challenger is None or int(challenger.version) < int(version.version):
        client.set_registered_model_alias(name, CHALLENGER, version.version)


def _find_rollback_versions(client: MlflowClient, name: str, to: str | None) -> tuple[str, str]:
    """(the champion, the version that replaces it)."""
    champion = find_version_by_alias(client, name, CHAMPION)
    if champion is None:
        raise RegistryError(
            f"{name!r} has no champion to roll back; check promotion.model_name and the MLflow"
            " store"
        )
    version = to or _find_previous_champion(client, name, champion)
    if version is None:
        raise RegistryError(
            f"{name!r} version {champion.version} is champion and replaced none; give a version"
            " with --to"
        )
    if version == str(champion.version):
        raise RegistryError(
            f"{name!r} version {version} is the champion already; nothing was changed"
        )
    try:
        client.get_model_version(name, version)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        numbers = sorted(
            int(known_version.version)
            for known_version in client.search_model_versions(f"name = '{name}'")
        )
        known = ", ".join(map(str, numbers[-10:]))
        raise RegistryError(
            f"{name!r} has no version {version}; give one with --to, such as {known}"
        ) from error
    return str(champion.version), version


def _find_previous_champion(client: MlflowClient, name: str, champion: ModelVersion) -> str | None:
    """The previous champion; the champion's tag knows it if an interrupted promotion has already
    moved ``previous``.
    """
    previous = find_version_by_alias(client, name, PREVIOUS)
    if previous is not None and previous.version != champion.version:
        return str(previous.version)
    return champion.tags.get(REPLACES) or None


def _move_champion(
    client: MlflowClient,
    name: str,
    champion: str | None,
    version: str,
    check_held: Callable[[], None],
) -> Registration:
    """The writes of a promotion, the decisive one last. The caller holds the lock."""
    # The tag first: killed after it, a retry overwrites it. Killed after PREVIOUS has moved, the
    # tag of the champion still knows the version before it (_find_previous_champion).
    client.set_model_version_tag(name, version, REPLACES, champion or "")
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
