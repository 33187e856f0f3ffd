"""A policy as a version of a registered MLflow model: what is stored, and how it gets there exactly
once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version as installed
from pathlib import Path

import mlflow.pyfunc
import pandas as pd
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelOutput
from mlflow.entities.model_registry import ModelVersion
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, Schema

from ebbflow.data.records import TrackedRun
from ebbflow.recipe.families import FAMILIES
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.secrets import redact_secrets
from ebbflow.storage.artifacts import COMMIT, MANIFEST, write_new_folder
from ebbflow.storage.disk import NO_SPACE_TEXT, remove_path, sha256_of_file
from ebbflow.storage.formats import VERSION_FORMAT, VERSION_FORMAT_TAG, explain_unknown_format
from ebbflow.storage.identity import SOURCE_SUFFIXES, find_package_roots
from ebbflow.tracking.store import (
    RUN,
    TrackingError,
    allow_long_uploads,
    find_sqlite_file,
    take_first_line,
)
from ebbflow.training.policy_metadata import METADATA, STATISTICS, read_policy_metadata

EVIDENCE = "evidence"
"""The folder of a version with what the gate decided from (``ebbflow.verification.evidence``)."""
BASE_DIGEST = "ebbflow.base_digest"
POLICY_DIGEST = "ebbflow.policy_digest"
MODEL_FILES_DIGEST = "ebbflow.model_files_digest"
BASE_STORED = "ebbflow.base_stored"
"""Tags: the digests of the version's base model, of its policy folder and of MLflow's own files,
and whether the base model is stored with it.
"""
CLEANED = "ebbflow.cleaned"
"""The tag of a version whose weights ``ebbflow clean`` has deleted, with the time."""
BYTECODE = "__pycache__"
REGISTERED_MODEL_META = "registered_model_meta"
"""The file that MLflow may add when it downloads a version."""
MAX_STORED_BASE = 2**30
"""Bytes up to which a base model is stored with its version; larger ones are only referenced, or
they would fill the store.
"""
LIBRARY = Path(__file__).parents[1]
CODE = "code"
"""The folder of a version that has Ebbflow's sources, and those of a user's own model family.
MLflow puts it on Python's path.
"""
REQUIREMENTS = (
    "accelerate",
    "cryptography",
    "diffusers",
    "huggingface-hub",
    "numpy",
    "pandas",
    "peft",
    "pillow",
    "pyarrow",
    "pydantic",
    "pydantic-core",
    "pyyaml",
    "safetensors",
    "tokenizers",
    "torch",
    "tqdm",
    "transformers",
)
"""What serving imports besides the sources. MLflow, which it adds itself, would load the model to
find out.
"""
OUTPUTS = {"image": "binary", "error": "string", "warning": "string", "sound": "binary"}
"""Columns of a prediction: a PNG, or why there is none, what to know of the picture, and a WAV."""
SIGNATURE = ModelSignature(
    inputs=Schema(
        [
            ColSpec("string", "prompt"),
            ColSpec("string", "negative_prompt", required=False),
            ColSpec("long", "seed", required=False),
            ColSpec("binary", "image", required=False),
        ]
    ),
    outputs=Schema([ColSpec(kind, name, required=False) for name, kind in OUTPUTS.items()]),
)


logger = logging.getLogger(__name__)


class RegistryError(TrackingError):
    """The registry was not, or must not be, changed."""


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
def raise_registry_errors(
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
        reason = redact_secrets(take_first_line(error))
        full_disk = NO_SPACE_TEXT.search(str(error))
        if full_disk:
            # A copied folder raises a tuple for each of its files.
            if isinstance(error, shutil.Error):
                reason = f"{error.args[0][0][1]}: {full_disk[0]}"
            fix = f"Free space where the store is. {fix}"
        raise RegistryError(
            f"could not {what} in {redact_secrets(uri)}: {reason}. {fix}"
        ) from error


def find_version(client: MlflowClient, name: str, run_id: str) -> ModelVersion | None:
    """Find the version that this run registered; the oldest one, should two attempts have raced."""
    versions = client.search_model_versions(f"name = '{name}' and tags.`{RUN}` = '{run_id}'")
    return min(versions, key=lambda version: int(version.version), default=None)


def create_version(
    client: MlflowClient,
    tracked: TrackedRun,
    policy: Path,
    base: Path | None,
    name: str,
    tags: dict[str, str],
    evidence: Path | None = None,
    *,
    attest: Callable[[dict[str, str]], dict[str, str]] = dict,
) -> ModelVersion:
    """Log the folders as an MLflow model of the parent run and register that. Uses neither pickle
    nor MLflow's active run.

    Example:
        What a version of a small model contains::

            MLmodel, requirements.txt, python_env.yaml …  written by MLflow
            code/ebbflow/…                                the sources that load it
            data/ebbflow/policy/…                         policy.json, *.safetensors, COMMIT
            data/ebbflow/base/…                           the base model
            evidence/…                                    what the gate decided from

    Args:
        attest: returns the tags with one that says who made the version.
    """
    if not (policy / METADATA).is_file():
        raise RegistryError(
            f"{policy} is no policy folder (it has no {METADATA}); pass one that a training stage"
            " committed"
        )
    # The order matters to a killed attempt: the version is created last, so a version that exists
    # is whole. Everything before it is found and completed by the retry.
    model = find_logged_model(client, tracked) or _create_logged_model(client, tracked, name, tags)
    tags = attest(tags | _upload_version(client, tracked, model, policy, base, evidence))
    client.finalize_logged_model(model.model_id, "READY")
    # Without an output the run's page does not show its model. A retry must not add it again.
    outputs = client.get_run(tracked.run_id).outputs
    if outputs is None or model.model_id not in [
        output.model_id for output in outputs.model_outputs
    ]:
        client.log_outputs(tracked.run_id, [LoggedModelOutput(model.model_id, step=0)])
    created = client.create_model_version(
        name, model.artifact_location, tracked.run_id, tags=tags, model_id=model.model_id
    )
    oldest = find_version(client, name, tracked.run_id) or created
    # its own duplicate, as in store.create_run; versions are numbers in some stores and strings in
    # others
    if int(oldest.version) != int(created.version):
        client.delete_model_version(name, created.version)
    return oldest


def require_weights(version: ModelVersion) -> None:
    """Check that this Ebbflow can read a version, and that its weights were not deleted on purpose.

    Raises:
        RegistryError: it is of a newer Ebbflow, or they were.
    """
    problem = explain_unknown_format(version.tags.get(VERSION_FORMAT_TAG), VERSION_FORMAT)
    if problem:
        raise RegistryError(
            f"{version.name!r} version {version.version}: {problem}; install that one"
        )
    when = version.tags.get(CLEANED)
    if when:
        raise RegistryError(
            f"the weights of {version.name!r} version {version.version} were deleted by `ebbflow"
            f" clean` ({when}), as it was never champion; its evidence is still there. Name another"
            " version"
        )


def find_logged_model(client: MlflowClient, tracked: TrackedRun) -> LoggedModel | None:
    """Find the run's policy as MLflow logged it. Without a version, a killed attempt left it, and
    this one completes it.
    """
    models = client.search_logged_models(
        [tracked.experiment_id], f"tags.`{RUN}` = '{tracked.run_id}'"
    )
    return min(models, key=lambda model: model.creation_timestamp, default=None)


def link_version_to_run(client: MlflowClient, tracked: TrackedRun, version: ModelVersion) -> None:
    """Tag the logged model, so that MLflow's UI finds the version from the run."""
    link = json.dumps([{"name": version.name, "version": version.version}])
    model = find_logged_model(client, tracked)
    if model:
        client.set_logged_model_tags(model.model_id, {"mlflow.modelVersions": link})


def link_served_folder(policy: Path, target: Path) -> None:
    """The part of a policy folder that serving reads, as a committed policy folder made of links.

    Copies, which can be twice the weights, and statistics are left out, as only training needs
    them. A folder without either is linked as a whole, COMMIT included.

    Raises:
        ArtifactError: the policy folder is incomplete.
    """
    metadata = read_policy_metadata(policy)
    # as a whole: its COMMIT is then that of the training stage, which the gate evaluated
    if not metadata.copies and not (policy / STATISTICS).exists():
        target.symlink_to(policy.resolve(), target_is_directory=True)
        return
    left_out = shutil.ignore_patterns(*metadata.copies, STATISTICS, METADATA, MANIFEST, COMMIT)
    with write_new_folder(target) as partial:
        shutil.copytree(
            policy.resolve(), partial, ignore=left_out, copy_function=os.symlink, dirs_exist_ok=True
        )
        # the metadata name the copies, which are not there
        (partial / METADATA).write_text(
            metadata.model_copy(update={"copies": ()}).model_dump_json(indent=2)
        )


def count_folder_bytes(folder: Path) -> int:
    """Total size of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def compute_model_files_digest(model: Path) -> str:
    """sha256 over MLflow's own files of a model, which name the module that loads it and the
    packages to install, and its code.

    Bytecode counts as well: Python would run it instead of the sources. It writes none beside the
    sources of a version (``_block_bytecode``).
    """
    mlflow_files = [
        path for path in model.iterdir() if path.is_file() and path.name != REGISTERED_MODEL_META
    ]
    code = [path for path in (model / CODE).rglob("*") if path.is_file()]
    files = {
        path.relative_to(model).as_posix(): sha256_of_file(path) for path in [*mlflow_files, *code]
    }
    # sorted, as folders are listed in another order on another machine
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def list_bytecode(model: Path) -> list[str]:
    """List the files of bytecode in the code of a model, by their paths below it."""
    return sorted(
        path.relative_to(model).as_posix()
        for path in (model / CODE).rglob("*")
        if path.suffix in (".pyc", ".pyo") or path.parent.name == BYTECODE
    )


def list_requirements() -> list[str]:
    """The installed versions of what serving imports, without a local part: ``2.13.0+cpu`` is on no
    package index but torch's.
    """
    return [f"{package}=={installed(package).partition('+')[0]}" for package in REQUIREMENTS]


def _create_logged_model(
    client: MlflowClient, tracked: TrackedRun, name: str, tags: dict[str, str]
) -> LoggedModel:
    created = client.create_logged_model(
        tracked.experiment_id,
        name=name,
        source_run_id=tracked.run_id,
        tags=tags,
        model_type="diffusion policy",
    )
    oldest = find_logged_model(client, tracked) or created
    if oldest.model_id != created.model_id:
        client.delete_logged_model(created.model_id)
    return oldest


def _upload_version(
    client: MlflowClient,
    tracked: TrackedRun,
    model: LoggedModel,
    policy: Path,
    base: Path | None,
    evidence: Path | None,
) -> dict[str, str]:
    """Upload what a version contains. Returns the tags that say what that was."""
    location = model.artifact_location
    model_id = model.model_id
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "model"
        data = _collect_data(Path(folder) / "ebbflow", policy, base)
        # pyfunc with a loader module and not mlflow.diffusers: that flavour holds one LoRA, names
        # the hub's current commit instead of the trained one, and its prediction has no seed. Nor a
        # Python model, which would be a pickle.
        mlflow.pyfunc.save_model(
            str(saved),
            loader_module="ebbflow.registry.serving",
            data_path=str(data),
            code_paths=_collect_code(Path(folder) / CODE, read_policy_metadata(policy).model),
            mlflow_model=Model(
                artifact_path=location,
                run_id=tracked.run_id,
                model_uuid=model_id,
                model_id=model_id,
            ),
            signature=SIGNATURE,
            input_example=pd.DataFrame({"prompt": ['"EBBS"'], "seed": [0]}),
            pip_requirements=list_requirements(),
        )
        _block_bytecode(saved / CODE)
        # after save_model, which knows no such folder, and before the upload
        if evidence:
            shutil.copytree(evidence, saved / EVIDENCE)
        # What a killed attempt left in a local store may share its files with other folders by now
        # (``ebbflow.retention``): they are replaced and never written in place.
        local = Path(location.removeprefix("file://"))
        if local.is_absolute():
            remove_path(local)
        with allow_long_uploads():
            client.log_model_artifacts(model_id, str(saved))
        base_stored = str((data / "base").is_dir()).lower()
        return {
            # COMMIT is the digest of the folder's files, which were verified when it was linked
            POLICY_DIGEST: (data / "policy" / COMMIT).read_text().strip(),
            MODEL_FILES_DIGEST: compute_model_files_digest(saved),
            BASE_STORED: base_stored,
        }


def _collect_data(data: Path, policy: Path, base: Path | None) -> Path:
    """``policy/`` and ``base/`` side by side, as links: weights are large, and MLflow follows links
    when it copies.
    """
    data.mkdir()
    link_served_folder(policy, data / "policy")
    if base is not None and count_folder_bytes(base) <= MAX_STORED_BASE:
        (data / "base").symlink_to(base.resolve(strict=True), target_is_directory=True)
    return data


def _collect_code(folder: Path, model: ModelConfig) -> list[str]:
    """The sources of Ebbflow, and of the package of a user's own family, as links below ``folder``;
    its entries.
    """
    # A version is loaded years later, where another Ebbflow or none is installed. MLflow puts these
    # sources before the installed ones.
    roots = [LIBRARY]
    if model.family not in FAMILIES:
        module = model.family.partition(":")[0]
        package_roots = find_package_roots(module)
        roots += package_roots
        if not package_roots:
            logger.warning(
                "the version lacks %s, which is not installed here: whatever serves it must"
                " have it",
                module,
            )
    for root in roots:
        _link_sources(root, folder / root.name)
    return [str(path) for path in sorted(folder.iterdir())]


def _block_bytecode(code: Path) -> None:
    """Put a file where Python would make its folder of bytecode, beside every source.

    MLflow imports a version of a store on this machine from where it lies. Python runs bytecode
    that it finds there instead of the sources, so that none may be there, neither a planted file
    nor one of Python's own, which nobody could tell apart. Where the folder cannot be made, Python
    does without.
    """
    folders = {path.parent for path in code.rglob("*.py")}
    for folder in folders:
        (folder / BYTECODE).write_text("This file keeps Python from writing bytecode here.\n")


def _link_sources(root: Path, target: Path) -> None:
    """Links to the sources at ``root``, a folder or a file. What else lies in a user's package may
    be large, or secret.
    """
    paths = [root] if root.is_file() else root.rglob("*")
    for path in paths:
        if path.suffix in SOURCE_SUFFIXES and path.is_file():
            link = target / path.relative_to(root)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())
