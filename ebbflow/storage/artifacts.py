"""Folders that are whole or do not exist.

A folder is written beside its final path, gets ``manifest.json`` (files, sizes, sha256), then
``COMMIT`` (sha256 of the manifest) last, and moves to its path. Readers accept only a folder whose
COMMIT matches, and writers replace only such a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from ebbflow.recipe.base import sanitize_text
from ebbflow.storage.disk import (
    atomic_write,
    create_private_folder,
    remove_path,
    sha256_of_file,
    sync_path,
)
from ebbflow.storage.locks import try_lock, wait_for_lock

MANIFEST = "manifest.json"
COMMIT = "COMMIT"
EXPORT = "export"
"""Kind of the folders that ``ebbflow export`` writes, and may replace."""
MAX_LISTED = 5
CLOCK_TICK = 2 * 10**9
"""Nanoseconds within which two changes of a file may get the same time: so young a folder is read
each time.
"""
LARGE = 4 * 2**30
"""Bytes of a folder that one process of a machine reads for all: reading it takes longer than
waiting until it is not young.
"""

RECORDS_KEPT = 24 * 3600
"""Seconds for which a machine keeps the record that a folder was read, after the last process that
asked.
"""


class ArtifactError(Exception):
    """An artifact that is not whole: names the folder, the files that do not match and the fix."""


@contextmanager
def write_new_folder(
    folder: Path, overwrite: bool = True, kind: str | None = None
) -> Iterator[Path]:
    """Yield an empty folder to write into; when the block ends it is committed and replaces
    ``folder``.

    An exception leaves nothing behind and whatever was at ``folder`` as it was. A link stays, and
    what it names is replaced.

    Args:
        overwrite: see ``check_replaceable``.
        kind: what the folder is, for its manifest, where a command replaces folders of this kind
            alone.

    Raises:
        ArtifactError: ``folder`` holds what may not be replaced, now or when the block ends.
        DiskFullError: no space was left.
    """
    check_replaceable(folder, overwrite, kind)

    def publish_folder(partial: Path, target: Path) -> None:
        commit_folder(partial, kind)
        # Checked a second time, since the block may take hours: somebody may have put files there.
        contents = _list_contents(target)
        check_replaceable(folder, overwrite, kind)
        _replace_folder(partial, target, contents)

    # A rename onto a link would replace the link itself, not the folder that it names.
    target = folder.resolve() if folder.is_symlink() else folder
    with atomic_write(target, create=Path.mkdir, publish=publish_folder) as partial:
        yield partial


def check_replaceable(folder: Path, overwrite: bool = True, kind: str | None = None) -> None:
    """Check that writing ``folder`` deletes nothing of a user: it is new, empty or, to
    ``overwrite``, exactly what was committed, of the same kind.

    Raises:
        ArtifactError: it holds something else.
    """
    # lexists: Path.exists follows links, and would overlook a broken one that a user has there.
    if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        also = ", or pass --overwrite to a command that has it" if _is_committed(folder) else ""
        raise ArtifactError(f"{folder} exists and is no empty folder; name a new one{also}")
    try:
        verify_folder(folder)
    except ArtifactError as error:
        raise ArtifactError(f"{error}. Nothing was deleted; name a new or empty folder") from None
    existing_kind = _read_kind(folder)
    if existing_kind != kind:
        raise ArtifactError(
            f"{folder} holds {_name_kind(existing_kind)}, not {_name_kind(kind)}. Nothing was"
            " deleted; name a new or empty folder"
        )


def _name_kind(kind: str | None) -> str:
    return f"an {kind}" if kind == EXPORT else "an artifact of a run"


def _list_contents(folder: Path) -> list[tuple[str, int, int, int]]:
    """List (name, inode, size, time of change) of everything in a folder; size and time of files
    alone.
    """
    contents = []
    for path in folder.rglob("*"):
        status = path.lstat()
        name = path.relative_to(folder).as_posix()
        if path.is_dir() and not path.is_symlink():
            contents.append((name, status.st_ino, 0, 0))
        else:
            contents.append((name, status.st_ino, status.st_size, status.st_ctime_ns))
    return sorted(contents)


def _replace_folder(new: Path, folder: Path, contents: list[tuple[str, int, int, int]]) -> None:
    """Put a new folder in the place of one whose contents may be deleted.

    A rename cannot replace a folder that is not empty, so the old one steps aside until the new
    one is in place.
    """
    old = new.with_name(f"{new.name}-old")
    if not folder.exists():
        new.rename(folder)
    else:
        folder.rename(old)
        try:
            # Under its new name no program finds it, so that what was saved until now is all.
            if _list_contents(old) != contents:
                raise ArtifactError(
                    f"{folder} changed while it was replaced. Nothing was deleted; name a new or"
                    " empty folder"
                )
            new.rename(folder)
        except (OSError, ArtifactError):
            old.rename(folder)
            raise
        remove_path(old)
    # A rename is an entry of the parent folder; without this a power loss could undo it.
    sync_path(folder.parent)


def commit_folder(folder: Path, kind: str | None = None) -> None:
    """Write the manifest of everything in ``folder``, then its COMMIT, each after what it describes
    has reached the disk.
    """
    (folder / MANIFEST).write_text(_build_manifest(folder, kind))
    # Everything that COMMIT vouches for is on the disk before COMMIT exists: file systems write in
    # any order, and a power loss in between must not leave a COMMIT beside empty files.
    for path in folder.rglob("*"):
        if path.is_file() or path.is_dir():
            sync_path(path)
    (folder / COMMIT).write_text(sha256_of_file(folder / MANIFEST))
    sync_path(folder / COMMIT)
    sync_path(folder)


def _build_manifest(folder: Path, kind: str | None = None) -> str:
    manifest: dict[str, Any] = {"files": _describe_files(folder)}
    if kind:
        manifest["kind"] = kind
    return json.dumps(manifest, indent=2, sort_keys=True)


def _read_kind(folder: Path) -> str | None:
    """Read what a verified folder says that it is; None for the artifacts of a run."""
    kind = json.loads((folder / MANIFEST).read_bytes()).get("kind")
    return kind if isinstance(kind, str) else None


def verify_folder(folder: Path) -> str:
    """Check that ``folder`` is exactly what was committed and return its digest (the content of
    COMMIT).

    A process reads the contents once, and again when name, size, inode or time of change of a file
    differ. Of a large folder, one process of the machine reads them.

    Raises:
        ArtifactError: it is missing, was never committed, holds a link to a folder, or a file was
            changed, added or lost.
    """
    if not (folder / COMMIT).is_file() or not (folder / MANIFEST).is_file():
        raise ArtifactError(
            f"{folder} has no COMMIT: it was never finished or is no artifact of Ebbflow; make it"
            " again"
        )
    state = _read_file_states(folder)
    # A file that changes twice within a tick of the file system's clock may show the same state
    # both times. The state of so young a folder identifies nothing, so that it is not cached.
    is_young = max(changed for *_, changed in state) >= time.time_ns() - CLOCK_TICK
    if is_young and _is_large_folder(state):
        # Two seconds are less than reading 4 GB, in this process and in every other that asks.
        time.sleep(CLOCK_TICK / 10**9)
        is_young = _read_file_states(folder) != state
    return _verify_contents(folder) if is_young else _verify_state_once(folder, state)


def digest_of_folder(folder: Path) -> str:
    """The digest of a committed folder, verified; of any other the one that it would have.

    Raises:
        ArtifactError: a committed folder is not what was committed.
    """
    if _is_committed(folder):
        return verify_folder(folder)
    return hashlib.sha256(_build_manifest(folder).encode()).hexdigest()


def verify_committed_folder(folder: Path) -> None:
    """``verify_folder`` a folder that may also be a user's own, which nobody has committed."""
    if _is_committed(folder):
        verify_folder(folder)


def _is_committed(folder: Path) -> bool:
    return (folder / COMMIT).exists() or (folder / MANIFEST).exists()


FileState = tuple[str, int, int, int, int]
"""(name, device, inode, size, time of change) of a file. Unlike that of modification, no program
can set this time.
"""


def _read_file_states(folder: Path) -> tuple[FileState, ...]:
    stats = (
        (path.relative_to(folder).as_posix(), path.stat())
        for path in [*_list_files(folder), folder / MANIFEST, folder / COMMIT]
    )
    return tuple(
        (name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_ctime_ns) for name, stat in stats
    )


def _is_large_folder(state: tuple[FileState, ...]) -> bool:
    return sum(size for _, _, _, size, _ in state) >= LARGE


@lru_cache(maxsize=256)
def _verify_state_once(folder: Path, state: tuple[FileState, ...]) -> str:
    """``_verify_contents`` of a folder in this state; an error is not cached."""
    if _is_large_folder(state):
        return _verify_once_per_machine(folder, state)
    return _verify_contents(folder)


def _verify_once_per_machine(folder: Path, state: tuple[FileState, ...]) -> str:
    """``_verify_contents`` by the first process that asks; the others wait for its record, which
    only this user can write.
    """
    name = hashlib.sha256(repr((folder.absolute(), state)).encode()).hexdigest()
    record = create_private_folder() / f"verified-{name}"
    # The ranks of one machine open the same base model at the same time. The first one reads it
    # while it has the lock; the others find the record.
    with wait_for_lock(record.with_suffix(".lock")):
        digest = (folder / COMMIT).read_text(errors="replace")
        # A record that a killed process left unfinished is not the digest, and is made again.
        if not record.exists() or record.read_text() != digest:
            record.write_text(_verify_contents(folder))
            _remove_old_records(record.parent)
        return record.read_text()


def _remove_old_records(folder: Path) -> None:
    """The records that no process asked for in ``RECORDS_KEPT``, with their locks: of folders that
    changed or are gone.
    """
    oldest_kept = time.time() - RECORDS_KEPT
    for lock in folder.glob("verified-*.lock"):
        with suppress(OSError):  # another process removed it first
            # wait_for_lock opens the file for writing, which sets its time of modification.
            if lock.stat().st_mtime < oldest_kept:
                with try_lock(lock) as is_unused:
                    if is_unused:
                        # The lock goes last: without it another process could write the record
                        # again, which would then be removed here.
                        lock.with_suffix("").unlink(missing_ok=True)
                        lock.unlink()


def _verify_contents(folder: Path) -> str:
    # COMMIT vouches for the manifest and the manifest for the files, so that one short digest
    # identifies the whole folder. A damaged COMMIT may hold any bytes; it must not raise.
    digest = (folder / COMMIT).read_text(errors="replace")
    if digest != sha256_of_file(folder / MANIFEST):
        raise ArtifactError(
            f"{folder / MANIFEST} does not match its COMMIT: the folder is damaged; make it again"
        )
    expected_files = read_manifest(folder)
    files = _describe_files(folder)
    if expected_files != files:
        changed_names = sorted(
            name
            for name in expected_files.keys() | files.keys()
            if expected_files.get(name) != files.get(name)
        )
        raise ArtifactError(
            f"{folder} does not match its manifest ({_format_names(changed_names)}); copy it again"
            " or make it again"
        )
    return digest


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read what the manifest of a folder says of each file: ``bytes`` and ``sha256``, by name.

    Raises:
        ArtifactError: it is no manifest.
    """
    manifest = folder / MANIFEST
    # The manifest may have been written by hand or by an attacker: RecursionError is that of JSON
    # which is nested a thousand deep.
    try:
        files = json.loads(manifest.read_bytes())["files"]
    except (ValueError, TypeError, KeyError, RecursionError):
        files = None
    if not isinstance(files, dict):
        raise ArtifactError(
            f"{manifest} is no JSON object with the key 'files'; copy the folder again or make it"
            " again"
        )
    return files


def _format_names(names: list[str]) -> str:
    # Names come from foreign folders, and may hold control characters of a terminal.
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(sanitize_text(name, 100) for name in names[:MAX_LISTED]) + more


def _describe_files(folder: Path) -> dict[str, dict[str, str | int]]:
    return {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": sha256_of_file(path),
        }
        for path in _list_files(folder)
    }


def _list_files(folder: Path) -> list[Path]:
    """Every file but the manifest and COMMIT, by name.

    Raises:
        ArtifactError: there is something else: a link to a folder, whose content no manifest could
            hold, a broken link, a pipe.
    """
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    strange_paths = [path for path in paths if not path.is_file()]
    if strange_paths:
        name = sanitize_text(strange_paths[0].relative_to(folder).as_posix(), 100)
        raise ArtifactError(
            f"{folder} holds {name!r}, which is neither a file nor a folder; put the content itself"
            " there"
        )
    return sorted(path for path in paths if path not in (folder / MANIFEST, folder / COMMIT))
