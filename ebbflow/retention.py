"""Delete what nobody needs of earlier runs: their files, the weights of rejected versions, and
copies of the same folder.

What is deleted is listed first, so that a person can look at the list before it happens. These are
safe by construction: versions of any model with an alias or a tag of a promotion, and their runs;
versions that Ebbflow did not register, that share their weights with one that stays, or whose run
is under way; and runs that have not finished, which may be resumed.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from ebbflow.recipe import Recipe
from ebbflow.recipe.retention import RetentionConfig
from ebbflow.registry.lock import LOCK as PROMOTING
from ebbflow.registry.model_version import (
    CLEANED,
    RegistryError,
    check_store_exists,
    raise_registry_errors,
)
from ebbflow.registry.promotion import ANCHORED, COMPARED_WITH, REPLACES, ROLLED_BACK
from ebbflow.run_list import RESOLVED_RECIPE, list_runs
from ebbflow.run_summary import SUMMARY
from ebbflow.storage.artifacts import COMMIT, MANIFEST, ArtifactError, verify_folder
from ebbflow.storage.disk import remove_path
from ebbflow.storage.formats import RUN_FORMAT_FILE
from ebbflow.storage.layout import COPIED_MODELS, QUEUE, QUEUES, TRAININGS
from ebbflow.storage.locks import LOCK, try_lock
from ebbflow.tracking.store import RUN, connect_to_store, find_sqlite_file

PROMOTED = (REPLACES, ROLLED_BACK, ANCHORED, "ebbflow.promoted_in")
"""Tags of versions that are or were champion."""
REPORT = "report.html"
KEPT_FILES = frozenset({LOCK, RESOLVED_RECIPE, RUN_FORMAT_FILE, SUMMARY, REPORT})
"""What stays of the folder of a finished run."""
DATA = "data"
"""The folder of a version with its policy and its base model."""
SECONDS_A_DAY = 24 * 3600

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Deletion:
    """Something that may go.

    Example:
        ``Deletion("run glyph-1f3a9c2e: all but its report", 38_000_000, delete)``
    """

    what: str
    num_bytes: int
    delete: Callable[[], bool]
    """Returns whether it was deleted; what has come into use since it was listed is not."""


def list_deletions(recipe: Recipe, retention: RetentionConfig, tracking_uri: str) -> list[Deletion]:
    """List what a retention lets go of the recipe's runs and versions, files of runs first.

    Raises:
        RegistryError: the registry does not answer, so that nobody knows what to protect.
    """
    try:
        check_store_exists(tracking_uri)
        client = connect_to_store(tracking_uri)
        versions = _list_versions(client, tracking_uri)
    except RegistryError:
        if find_sqlite_file(tracking_uri) is None:
            raise
        return []  # no store, and so neither runs nor versions
    deletions: list[Deletion] = []
    if retention.keep_runs is not None and "://" not in recipe.output:
        # Of every model: the recipe may have had another ``promotion.model_name``.
        champions = _find_compared_champions(versions)
        protected = {
            version.tags.get(RUN, version.run_id or "")
            for version in versions
            if _was_promoted(version) or _name_version(version) in champions
        }
        output = Path(recipe.output)
        deletions += _list_old_runs(output, retention.keep_runs, protected, recipe.name)
        deletions += _list_flywheel_leftovers(recipe, output, retention.keep_runs)
    if retention.keep_rejected_days is not None:
        name = recipe.promotion.model_name
        with raise_registry_errors(f"list the rejected versions of {name!r}", tracking_uri):
            rejected = _select_rejected(client, versions, name, retention.keep_rejected_days)
            deletions += [_describe_cleaning(client, version) for version in rejected]
    return deletions


def delete_all(deletions: list[Deletion]) -> int:
    """Delete what was listed; return the bytes that this freed.

    Raises:
        RegistryError: the registry does not answer.
    """
    freed = 0
    for deletion in deletions:
        if deletion.delete():
            logger.info("deleted %s", deletion.what)
            freed += deletion.num_bytes
    return freed


def link_equal_folders(output: Path) -> int:
    """Let committed folders below ``output`` with the same digest share their files by hard links;
    return the bytes that this freed.

    A base model is then stored once, however many runs and versions have it. Nothing writes into a
    committed folder: who replaces one makes new files. Folders of runs, trainings and queues that a
    process works in are left alone: who replaces one checks first that nobody changes it.
    """
    folders = defaultdict(list)
    for commit in sorted(output.rglob(COMMIT)):
        folder = commit.parent
        # What is under way deletes folders while they are read.
        with _lock_owner_of(output, folder) as is_free:
            if is_free and (folder / MANIFEST).is_file() and not folder.is_symlink():
                folders[commit.read_text(errors="replace").strip()].append(folder)
    freed = 0
    for equal in folders.values():
        # Reading a base model takes minutes, so that only what is to be linked is read.
        if len({_read_inodes(folder) for folder in equal}) == 1:
            continue
        whole = [folder for folder in equal if _is_whole(folder)]
        for folder in whole[1:]:
            with _lock_owner_of(output, folder) as is_free:
                if is_free:
                    freed += _link_files(whole[0], folder)
    return freed


def _read_inodes(folder: Path) -> tuple[tuple[int, int], ...]:
    """Read which files a committed folder consists of: folders that share theirs have the same."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return tuple((path.stat().st_dev, path.stat().st_ino) for path in files)


@contextmanager
def _lock_owner_of(output: Path, folder: Path) -> Iterator[bool]:
    """Lock the run, the training or the queue that a folder below ``output`` belongs to, if it is
    one of theirs; yields whether no process works there.
    """
    # Of a run output/RUN, of a queue output/queues/RECIPE: the outermost folder with a lock.
    homes = [parent for parent in reversed(folder.parents) if output in parent.parents]
    lock = next((home / LOCK for home in homes if (home / LOCK).is_file()), None)
    if lock:
        with try_lock(lock) as is_free:
            yield is_free
    else:
        yield True


def _list_versions(client: MlflowClient, tracking_uri: str) -> list[ModelVersion]:
    """List all versions of all models, with their aliases."""
    with raise_registry_errors("list the versions of all models", tracking_uri):
        versions: list[ModelVersion] = []
        token = None
        while True:
            page = client.search_model_versions(page_token=token)
            versions += page
            token = page.token
            if not token:
                break
        # A search does not fill in the aliases of a version in every store.
        aliases = defaultdict(list)
        for name in {version.name for version in versions}:
            for alias, number in client.get_registered_model(name).aliases.items():
                aliases[name, str(number)].append(alias)
    for version in versions:
        version._aliases = aliases[version.name, str(version.version)]
    return versions


def _was_promoted(version: ModelVersion) -> bool:
    """Return whether a version has an alias, or is or was champion."""
    return bool(version.aliases) or any(tag in version.tags for tag in PROMOTED)


def _name_version(version: ModelVersion) -> tuple[str, str]:
    return version.name, str(version.version)


def _find_compared_champions(versions: list[ModelVersion]) -> set[tuple[str, str]]:
    """Find the versions, by model and number, that were champion when another run was compared with
    them.

    Somebody who moves the alias in MLflow leaves no tag of a promotion, and MLflow keeps no history
    of aliases; every run that met the champion does.
    """
    return {
        (version.name, version.tags[tag])
        for version in versions
        for tag in (COMPARED_WITH, REPLACES)
        if tag in version.tags
    }


def _list_old_runs(
    output: Path, keep_runs: int, protected: set[str], name: str
) -> Iterator[Deletion]:
    """Yield the finished runs of a recipe beyond its newest. The name of a run's folder consists of
    the recipe's and of the beginning of the run's id.
    """
    # the newest first
    finished = [run.home for run in list_runs(output) if run.state == "finished"]
    of_recipe = [home for home in finished if home.name.rpartition("-")[0] == name]
    short_ids = {run_id[:8] for run_id in protected}
    for folder in of_recipe[keep_runs:]:
        if folder.name.rpartition("-")[2] in short_ids:
            continue
        paths = [path for path in folder.iterdir() if path.name not in KEPT_FILES]
        num_bytes = sum(map(count_bytes, paths))
        if paths:
            yield Deletion(
                f"run {folder.name}: all but its report, summary and recipe",
                num_bytes,
                _bind_removal(folder, paths),
            )


def _list_flywheel_leftovers(recipe: Recipe, output: Path, keep: int) -> Iterator[Deletion]:
    """Yield what killed turns have left: trainings of the recipe's reward model beyond the newest,
    and copies of models in the folder of its queue.

    A training that ended leaves nothing but its registered version. One that was killed resumes if
    it is asked for with the same labels; with more labels it never is.
    """
    if recipe.reward_model is None:
        return
    # Those that are emptied already are not counted: emptying one made it the newest.
    trainings = [
        (lock.parent, [path for path in lock.parent.iterdir() if path.name != LOCK])
        for lock in output.glob(f"{TRAININGS}/{recipe.reward_model.name}/*/{LOCK}")
    ]
    newest_first = sorted(
        [(home, paths) for home, paths in trainings if paths],
        key=lambda training: (training[0].stat().st_mtime, training[0].name),
        reverse=True,
    )
    candidates = [(home, paths, "a killed training") for home, paths in newest_first[keep:]]
    folder = output / QUEUES / recipe.name
    # Without the queue its generation is not over.
    if (folder / QUEUE).is_file() and (folder / LOCK).is_file():
        copies = folder / COPIED_MODELS
        if copies.exists():
            candidates.append((folder, [copies], "models that made its queue"))
    for home, paths, what in candidates:
        if paths:
            yield Deletion(
                f"{home.relative_to(output)}: {what}",
                sum(map(count_bytes, paths)),
                _bind_removal(home, paths),
            )


def _bind_removal(folder: Path, paths: list[Path]) -> Callable[[], bool]:
    def remove() -> bool:
        # The run may have been started again since it was listed.
        with try_lock(folder / LOCK) as is_free:
            if not is_free:
                logger.warning("%s is in use, and was left alone", folder)
                return False
            for path in paths:
                remove_path(path)
            return True

    return remove


def _select_rejected(
    client: MlflowClient, versions: list[ModelVersion], name: str, days: float
) -> list[ModelVersion]:
    """Select the versions of a model that Ebbflow registered, that were never champion, are older,
    and still have their weights.

    A version whose run is under way stays: it may wait for its approval. So does one whose weights
    are also those of a version that stays, such as a copy in another model.
    """
    oldest = time.time() - days * SECONDS_A_DAY
    champions = _find_compared_champions(versions)
    rejected = [
        version
        for version in versions
        if version.name == name
        and RUN in version.tags
        and CLEANED not in version.tags
        and not _was_promoted(version)
        and _name_version(version) not in champions
        and version.creation_timestamp / 1000 < oldest
        and not _is_run_under_way(client, version.tags[RUN])
    ]
    numbers = {version.version for version in rejected}
    needed = {
        place
        for version in versions
        if version.name != name or version.version not in numbers
        for place in (version.source, version.model_id)
        if place
    }
    # ``MlflowClient.copy_model_version`` makes a version whose source is the other version.
    return [
        version
        for version in rejected
        if needed.isdisjoint(
            (version.source, version.model_id, f"models:/{name}/{version.version}")
        )
    ]


def _is_run_under_way(client: MlflowClient, run_id: str) -> bool:
    try:
        return str(client.get_run(run_id).info.status) == "RUNNING"
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False  # somebody deleted it


def _describe_cleaning(client: MlflowClient, version: ModelVersion) -> Deletion:
    location = client.get_model_version_download_uri(version.name, version.version)
    local = Path(location.removeprefix("file://"))
    return Deletion(
        f"weights of {version.name} version {version.version}, which was not promoted",
        count_bytes(local / DATA) if local.is_dir() else 0,
        partial(_clean_version, client, version.name, str(version.version), location),
    )


def _clean_version(client: MlflowClient, name: str, version: str, location: str) -> bool:
    """Delete the weights of a version, unless it has been promoted since it was listed."""
    what = f"delete the weights of {name!r} version {version}"
    with raise_registry_errors(what, client.tracking_uri, "Run `ebbflow clean` again"):
        # The tag first: weights that are gone without one look like damage. And only then a look:
        # a promotion takes its lock first and then looks for this tag, so that one of the two sees
        # the other.
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        client.set_model_version_tag(name, version, CLEANED, when)
        current = client.get_model_version(name, version)
        if _was_promoted(current) or PROMOTING in current.tags:
            client.delete_model_version_tag(name, version, CLEANED)
            logger.warning("%s version %s is in use", name, version)
            return False
        repository = get_artifact_repository(location, tracking_uri=client.tracking_uri)
        repository.delete_artifacts(DATA)
    return True


def count_bytes(path: Path) -> int:
    """Count the bytes of a file, or of the files below a folder, each inode once."""
    files = [path] if path.is_file() else path.rglob("*")
    sizes = {}
    for file in files:
        if file.is_file() and not file.is_symlink():
            status = file.stat()
            sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def _is_whole(folder: Path) -> bool:
    try:
        verify_folder(folder)
    except ArtifactError as error:
        logger.warning("%s", error)
        return False
    return True


def _link_files(source: Path, folder: Path) -> int:
    """Replace the files of a folder by links to those of an equal one; return the bytes freed."""
    freed = 0
    for path in sorted(source.rglob("*")):
        target = folder / path.relative_to(source)
        if not path.is_file() or path.is_symlink() or target.is_symlink():
            continue
        status = target.stat()
        original = path.stat()
        if status.st_ino == original.st_ino or status.st_dev != original.st_dev:
            continue
        # Beside the folder: in it, whoever reads it meanwhile would find a file too many.
        link = folder.with_name(f".{folder.name}.link-{os.getpid()}")
        link.unlink(missing_ok=True)
        try:
            # Whoever writes into one of them in place would change all. Read-only files stop that,
            # but for root; they can still be replaced and deleted. Reflinks, which could be
            # written, are in few file systems, and would be read again at every cleaning: nothing
            # shows that they share their bytes.
            path.chmod(original.st_mode & ~0o222)
            os.link(path, link)
        # A file system without hard links, or a file of another user.
        except OSError as error:
            logger.warning("%s keeps its own copy of %s: %s", folder, source, error)
            return freed
        link.replace(target)
        # A file with another name elsewhere keeps its bytes.
        if status.st_nlink == 1:
            freed += status.st_size
    return freed


def clean(recipe: Recipe, tracking_uri: str) -> int:
    """Apply a recipe's retention to its runs and versions; return the bytes that this freed."""
    retention = recipe.retention
    if retention == RetentionConfig():
        return 0
    freed = delete_all(list_deletions(recipe, retention, tracking_uri))
    if "://" not in recipe.output:
        freed += link_equal_folders(Path(recipe.output))
    return freed
