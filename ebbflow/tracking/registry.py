"""The model registry: every run's best policy becomes a version, and the gate decides which one is champion.

Aliases: ``challenger`` is the newest version, ``champion`` the one in use, ``previous`` the one it replaced. Unlike metrics, no
write here may get lost: whatever fails raises, and doing it again gives what an undisturbed attempt would have given. Moving the
champion is the last write of a promotion, so that a promotion which fails has not happened.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version as installed
from pathlib import Path

import mlflow.artifacts
import mlflow.pyfunc
import pandas as pd
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelOutput
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, Schema

from ebbflow.data.records import Champion, GateDecision, Registration, TrackedRun
from ebbflow.recipe.secrets import redact
from ebbflow.storage.artifacts import COMMIT, MANIFEST, new_folder, verify
from ebbflow.storage.disk import safe_join
from ebbflow.tracking.claim import CHAMPION, alias_of, registry_lock
from ebbflow.tracking.store import DIGEST, EXECUTION, TrackingError, connect, uploading
from ebbflow.training.policy_metadata import METADATA, STATISTICS, read_policy_metadata

CHALLENGER, PREVIOUS = "challenger", "previous"
RUN, REPLACES, ROLLED_BACK = "ebbflow.run_id", "ebbflow.replaces", "ebbflow.rolled_back"
MAX_TAG = 5000
STORED_BASE = 2**30
"""Bytes of a base model above which a version only refers to it: tens of GB a version would fill every store."""
REQUIREMENTS = ("diffusers", "peft", "pillow", "safetensors", "torch", "transformers")
"""What serving imports beside Ebbflow itself; pinned to what is installed. Explicit, because MLflow would load the model to find
out."""
SIGNATURE = ModelSignature(
    inputs=Schema(
        [
            ColSpec("string", "prompt"),
            ColSpec("string", "negative_prompt", required=False),
            ColSpec("long", "seed", required=False),
            ColSpec("binary", "image", required=False),
        ]
    ),
    outputs=Schema([ColSpec("binary", "image")]),
)


class RegistryError(TrackingError):
    """The registry was not, or must not be, changed."""


def register(
    tracked: TrackedRun,
    policy: Path,
    base: Path | None,
    decision: GateDecision,
    lineage: dict[str, str],
    *,
    model_name: str,
    expected_champion: str | None,
) -> Registration:
    """Register a run's policy as challenger. A retry changes nothing.

    Args:
        policy: a committed policy folder (with policy.json); what only training reads in it is not registered.
        base: the base model's folder, stored with it so that the version renders by itself unless it is large
            (``STORED_BASE``); None leaves it out.
        lineage: further tags, such as ``execution_id`` and ``base_digest``; they get the prefix ``ebbflow.`` unless dotted.
        model_name: the registered model.
        expected_champion: the version that the gate compared with, None when there was no champion.

    Raises:
        RegistryError: a write failed.
    """
    client = connect(tracked.tracking_uri)
    with _writing(f"register the policy of run {tracked.run_id} as {model_name!r}", tracked.tracking_uri):
        _ensure_model(client, model_name)
        version = _version_of(client, model_name, tracked.run_id)
        if version is None:
            tags = _tags(client, tracked, decision, lineage, expected_champion)
            version = _create_version(client, tracked, policy, base, model_name, tags)
        _link(client, tracked, version)
        _challenge(client, model_name, version)
        return _registration(client, model_name, str(version.version))


def promote(
    tracked: TrackedRun, registration: Registration, tags: dict[str, str], *, expected_champion: str | None
) -> Registration:
    """Make a registered version champion. Of several at once one wins, and a retry changes nothing.

    Args:
        tags: what the version is to remember of its promotion; they get the prefix ``ebbflow.`` unless dotted.
        expected_champion: the version that the gate compared with, None when there was no champion.

    Raises:
        RegistryError: a write failed, the champion is no longer the one that the gate compared with, or the version was champion
            and has been rolled back. The champion has not moved, unless the answer to the write that moves it was lost.
        ClaimError: another promotion of the model did not end.
    """
    client, name, version = connect(tracked.tracking_uri), registration.model_name, registration.version
    with (
        _writing(f"make {name!r} version {version} champion", tracked.tracking_uri),
        registry_lock(client, name, version, expected_champion) as still_mine,
    ):
        champion = _champion_number(client, name)
        if champion == version:
            return _registration(client, name, version)
        if champion != expected_champion:
            raise RegistryError(
                f"{name!r} version {version} was compared with champion {expected_champion or '(none)'}, but the champion is now "
                f"{champion or '(none)'}; it stays challenger. To compare it with the new champion begin anew, in a new "
                f"execution; on one machine, delete {tracked.folder} first"
            )
        if rolled_back := client.get_model_version(name, version).tags.get(ROLLED_BACK):
            raise RegistryError(
                f"{name!r} version {version} was champion and has been rolled back ({rolled_back}); a retry does not bring it "
                f"back. If you want that, run `ebbflow rollback RECIPE --to {version}`"
            )
        still_mine()
        for key, value in _dotted(tags).items():
            client.set_model_version_tag(name, version, key, value)
        return _move_champion(client, name, champion, version, still_mine)


def rollback(tracking_uri: str, model_name: str, to: str | None = None) -> Registration:
    """Make the previous champion champion again, or the version ``to``; the one rolled back from becomes ``previous``.

    Raises:
        RegistryError: there is no champion, no previous one or no such version, it is champion already, somebody else moved the
            champion meanwhile, or a write failed.
        ClaimError: a promotion of the model did not end.
    """
    if tracking_uri.startswith("sqlite:///") and not Path(tracking_uri.removeprefix("sqlite:///")).is_file():
        raise RegistryError(f"there is no MLflow store at {tracking_uri}; run this where the pipeline ran, or name its store")
    client = connect(tracking_uri)
    with _writing(f"roll {model_name!r} back", tracking_uri, "Run the command again"):
        champion, version = _rollback_of(client, model_name, to)
        with registry_lock(client, model_name, version, champion) as still_mine:
            if (current := _champion_number(client, model_name)) != champion:
                raise RegistryError(
                    f"the champion of {model_name!r} was {champion} and is now {current or '(none)'}; nothing was rolled back. "
                    "Run the command again if the new one should go too"
                )
            still_mine()
            note = f"to version {version}, {datetime.now(UTC).isoformat(timespec='seconds')}"
            client.set_model_version_tag(model_name, champion, ROLLED_BACK, note)
            return _move_champion(client, model_name, champion, version, still_mine)


def find_champion(tracking_uri: str, model_name: str) -> Champion | None:
    """The champion of a registered model; None when the model does not exist yet or has none."""
    with _writing(f"look up the champion of {model_name!r}", tracking_uri):
        version = alias_of(connect(tracking_uri), model_name, CHAMPION)
    if version is None:
        return None
    return Champion(
        tracking_uri=tracking_uri,
        model_name=model_name,
        version=str(version.version),
        run_id=version.tags.get(RUN, version.run_id or ""),
        recipe_digest=version.tags.get(DIGEST, ""),
        base_digest=version.tags.get("ebbflow.base_digest", ""),
    )


def download_champion(champion: Champion, into: Path) -> Path:
    """Fetch that very version, even if another one has become champion since. Returns the folder with ``policy/``."""
    client = connect(champion.tracking_uri)
    with _writing(f"download {champion.model_name!r} version {champion.version}", champion.tracking_uri):
        # not "models:/<name>/<version>": MLflow resolves that in the process-wide registry, whatever it is told
        uri = client.get_model_version_download_uri(champion.model_name, champion.version)
        model = mlflow.artifacts.download_artifacts(uri, dst_path=str(into), tracking_uri=champion.tracking_uri)
    flavor = Model.load(model).flavors.get(mlflow.pyfunc.FLAVOR_NAME, {})
    data = safe_join(Path(model), flavor.get(mlflow.pyfunc.DATA, "data"))
    if not (data / "policy" / METADATA).is_file():
        raise RegistryError(
            f"{champion.model_name!r} version {champion.version} holds no policy/{METADATA}, so Ebbflow did not register it; "
            f"move the alias {CHAMPION!r} to a version that Ebbflow made, or delete the alias"
        )
    return data


def champion_folders(champion: Champion, into: Path, base: Path) -> tuple[Path, Path]:
    """(base-model folder, policy folder) of a champion; its own base where the version carries one, else ``base``.

    Raises:
        RegistryError: it was trained from another base than ``base`` and does not carry its own.
    """
    data = download_champion(champion, into)
    if (data / "base").is_dir():
        return data / "base", data / "policy"
    if champion.base_digest != (digest := verify(base)):
        raise RegistryError(
            f"{champion.model_name!r} version {champion.version} was trained from base "
            f"{champion.base_digest[:12] or '(unknown)'}, this run has base {digest[:12]}; "
            "give the recipe another promotion.model_name"
        )
    return base, data / "policy"


@contextmanager
def _writing(what: str, uri: str, way_out: str = "Run the task again: it goes on where it stopped") -> Iterator[None]:
    """Whatever a store raises becomes one error that says what was being done."""
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        raise RegistryError(f"could not {what} in {redact(uri)}: {redact(str(error))}. {way_out}") from error


def _ensure_model(client: MlflowClient, name: str) -> None:
    try:
        client.create_registered_model(name, description="Policies post-trained by Ebbflow; the gate moves the alias champion.")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _version_of(client: MlflowClient, name: str, run_id: str) -> ModelVersion | None:
    """The version that this run registered; the oldest one, should two attempts have raced."""
    found = client.search_model_versions(f"name = '{name}' and tags.`{RUN}` = '{run_id}'")
    return min(found, key=lambda version: int(version.version), default=None)


def _tags(
    client: MlflowClient, tracked: TrackedRun, decision: GateDecision, lineage: dict[str, str], expected_champion: str | None
) -> dict[str, str]:
    run_tags = client.get_run(tracked.run_id).data.tags
    execution = {EXECUTION: run_tags[EXECUTION]} if EXECUTION in run_tags else {}
    gate = {"ebbflow.compared_with": expected_champion or "no champion", "ebbflow.decision": _as_tag(decision)}
    return {**_dotted(lineage), **execution, **gate, RUN: tracked.run_id, DIGEST: tracked.recipe_digest}


def _dotted(tags: dict[str, str]) -> dict[str, str]:
    return {key if "." in key else f"ebbflow.{key}": value for key, value in tags.items()}


def _as_tag(decision: GateDecision) -> str:
    text = decision.model_dump_json()
    # the sentences repeat the numbers, so they go first when there are too many guardrails for a tag
    return text if len(text) <= MAX_TAG else decision.model_dump_json(exclude={"reasons"})[:MAX_TAG]


def _create_version(
    client: MlflowClient, tracked: TrackedRun, policy: Path, base: Path | None, name: str, tags: dict[str, str]
) -> ModelVersion:
    """Log the folders as an MLflow model of the parent run, then make it a version. No step uses pickle or the active run."""
    if not (policy / METADATA).is_file():
        raise RegistryError(f"{policy} is no policy folder (no {METADATA} in it); pass the one that a training stage committed")
    model = _logged_model_of(client, tracked) or _logged_model(client, tracked, name, tags)
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "model"
        uri, number = model.artifact_location, model.model_id
        mlflow.pyfunc.save_model(
            str(saved),
            loader_module="ebbflow.tracking.serving",
            data_path=str(_gather(Path(folder) / "ebbflow", policy, base)),
            mlflow_model=Model(artifact_path=uri, run_id=tracked.run_id, model_uuid=number, model_id=number),
            signature=SIGNATURE,
            input_example=pd.DataFrame({"prompt": ['"EBBS"'], "seed": [0]}),
            pip_requirements=[f"{package}=={installed(package)}" for package in REQUIREMENTS],
        )
        with uploading():
            client.log_model_artifacts(model.model_id, str(saved))
    client.finalize_logged_model(model.model_id, "READY")
    outputs = client.get_run(tracked.run_id).outputs
    if outputs is None or model.model_id not in [output.model_id for output in outputs.model_outputs]:
        client.log_outputs(tracked.run_id, [LoggedModelOutput(model.model_id, step=0)])
    made = client.create_model_version(name, model.artifact_location, tracked.run_id, tags=tags, model_id=model.model_id)
    oldest = _version_of(client, name, tracked.run_id) or made
    if int(oldest.version) != int(made.version):  # some stores have numbers, others texts
        client.delete_model_version(name, made.version)  # as for a run (``create_run``)
    return oldest


def _logged_model(client: MlflowClient, tracked: TrackedRun, name: str, tags: dict[str, str]) -> LoggedModel:
    made = client.create_logged_model(
        tracked.experiment_id, name=name, source_run_id=tracked.run_id, tags=tags, model_type="diffusion policy"
    )
    oldest = _logged_model_of(client, tracked) or made
    if oldest.model_id != made.model_id:
        client.delete_logged_model(made.model_id)
    return oldest


def _logged_model_of(client: MlflowClient, tracked: TrackedRun) -> LoggedModel | None:
    """The run's policy as MLflow logged it; when there is no version yet, a killed attempt left it, and is gone on with."""
    found = client.search_logged_models([tracked.experiment_id], f"tags.`{RUN}` = '{tracked.run_id}'")
    return min(found, key=lambda model: model.creation_timestamp, default=None)


def _link(client: MlflowClient, tracked: TrackedRun, version: ModelVersion) -> None:
    """How MLflow's UI finds the version from the run."""
    link = json.dumps([{"name": version.name, "version": version.version}])
    if model := _logged_model_of(client, tracked):
        client.set_logged_model_tags(model.model_id, {"mlflow.modelVersions": link})


def _gather(data: Path, policy: Path, base: Path | None) -> Path:
    """``policy/`` and ``base/`` side by side. Links: MLflow follows them when it copies, and weights are large."""
    data.mkdir()
    served_folder(policy, data / "policy")
    if base is not None and folder_bytes(base) <= STORED_BASE:
        (data / "base").symlink_to(base.resolve(strict=True), target_is_directory=True)
    return data


def folder_bytes(folder: Path) -> int:
    """Size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def served_folder(policy: Path, target: Path) -> None:
    """What serving reads of a policy folder, as a whole policy folder of its own that is made of links.

    What only training goes on from is left out: copies, which can be twice the weights, and statistics. A folder with nothing of
    the kind stays as it is, COMMIT included.

    Raises:
        ArtifactError: the policy folder is not whole.
    """
    metadata = read_policy_metadata(policy)
    if not metadata.copies and not (policy / STATISTICS).exists():
        target.symlink_to(policy.resolve(), target_is_directory=True)
        return
    left_out = shutil.ignore_patterns(*metadata.copies, STATISTICS, METADATA, MANIFEST, COMMIT)
    with new_folder(target) as unfinished:
        shutil.copytree(policy.resolve(), unfinished, ignore=left_out, copy_function=os.symlink, dirs_exist_ok=True)
        (unfinished / METADATA).write_text(metadata.model_copy(update={"copies": ()}).model_dump_json(indent=2))


def _challenge(client: MlflowClient, name: str, version: ModelVersion) -> None:
    """A late retry must not take the alias from a run that came after."""
    challenger = alias_of(client, name, CHALLENGER)
    if challenger is None or int(challenger.version) < int(version.version):
        client.set_registered_model_alias(name, CHALLENGER, version.version)


def _rollback_of(client: MlflowClient, name: str, to: str | None) -> tuple[str, str]:
    """(the champion, the version that takes its place)."""
    champion = alias_of(client, name, CHAMPION)
    if champion is None:
        raise RegistryError(f"{name!r} has no champion, so nothing can be rolled back; check promotion.model_name and the store")
    version = to or _before(client, name, champion)
    if version is None:
        raise RegistryError(f"{name!r} version {champion.version} is champion and replaced none; name a version with --to")
    if version == str(champion.version):
        raise RegistryError(f"{name!r} version {version} is the champion already; nothing was changed")
    try:
        client.get_model_version(name, version)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        numbers = sorted(int(found.version) for found in client.search_model_versions(f"name = '{name}'"))
        known = ", ".join(map(str, numbers[-10:]))
        raise RegistryError(f"{name!r} has no version {version}; the newest are {known}. Name one with --to") from error
    return str(champion.version), version


def _before(client: MlflowClient, name: str, champion: ModelVersion) -> str | None:
    """The previous champion. A promotion that was cut short has moved ``previous`` to the champion: then the tag knows."""
    previous = alias_of(client, name, PREVIOUS)
    if previous is not None and previous.version != champion.version:
        return str(previous.version)
    return champion.tags.get(REPLACES) or None


def _move_champion(
    client: MlflowClient, name: str, champion: str | None, version: str, still_mine: Callable[[], None]
) -> Registration:
    """The writes of every promotion, the one that counts last. Under a claim only."""
    client.set_model_version_tag(name, version, REPLACES, champion or "")
    if champion is not None:
        client.set_registered_model_alias(name, PREVIOUS, champion)
    still_mine()
    client.set_registered_model_alias(name, CHAMPION, version)
    return Registration(model_name=name, version=version, champion=True, previous=champion)


def _registration(client: MlflowClient, name: str, version: str) -> Registration:
    champion = alias_of(client, name, CHAMPION)
    if champion is None or str(champion.version) != version:
        return Registration(model_name=name, version=version, champion=False, previous=None)
    return Registration(model_name=name, version=version, champion=True, previous=champion.tags.get(REPLACES) or None)


def _champion_number(client: MlflowClient, name: str) -> str | None:
    champion = alias_of(client, name, CHAMPION)
    return str(champion.version) if champion else None
