"""Folders that are whole or do not exist.

A folder is written beside its final path, gets ``manifest.json`` (files, sizes, sha256), then ``COMMIT`` (sha256 of the
manifest) last, and moves to its path. Readers accept only a folder whose COMMIT matches.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ebbflow.recipe.base import sanitize
from ebbflow.storage.disk import atomic_write, sha256_of

MANIFEST, COMMIT = "manifest.json", "COMMIT"
MAX_LISTED = 5


class ArtifactError(Exception):
    """An artifact that is not whole: names the folder, the files that do not match and the fix."""


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write into; when the block ends it is committed and replaces ``folder``.

    An exception leaves nothing behind and whatever was at ``folder`` as it was.

    Raises:
        DiskFullError: no space was left.
    """
    with atomic_write(folder, create=Path.mkdir, publish=_publish) as partial:
        yield partial


def _publish(partial: Path, folder: Path) -> None:
    commit(partial)
    _put_in_place(partial, folder)


def _put_in_place(new: Path, folder: Path) -> None:
    """A rename cannot replace a folder that is not empty, so the old one steps aside until the new one is in place."""
    old = new.with_name(f"{new.name}-old")
    if not folder.exists():
        new.rename(folder)
    else:
        folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    _to_disk(folder.parent)


def commit(folder: Path) -> None:
    """Write the manifest of everything in ``folder``, then its COMMIT, each after what it describes has reached the disk."""
    manifest = json.dumps({"files": _files(folder)}, indent=2, sort_keys=True)
    (folder / MANIFEST).write_text(manifest)
    for path in folder.rglob("*"):
        if path.is_file() or path.is_dir():
            _to_disk(path)
    (folder / COMMIT).write_text(sha256_of(folder / MANIFEST))
    _to_disk(folder / COMMIT)
    _to_disk(folder)


def _to_disk(path: Path) -> None:
    """Wait until a file or a folder would survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def verify(folder: Path) -> str:
    """Check that ``folder`` is exactly what was committed and return its digest (the content of COMMIT).

    Raises:
        ArtifactError: it is missing, was never committed, or a file was changed, added or lost.
    """
    if not (folder / COMMIT).is_file() or not (folder / MANIFEST).is_file():
        raise ArtifactError(f"{folder} has no COMMIT: it was never finished or is no artifact of Ebbflow; make it again")
    digest = (folder / COMMIT).read_text(errors="replace").strip()
    if digest != sha256_of(folder / MANIFEST):
        raise ArtifactError(f"{folder / MANIFEST} does not match its COMMIT: the folder is damaged; make it again")
    expected, found = _expected(folder / MANIFEST), _files(folder)
    if expected != found:
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise ArtifactError(f"{folder} does not match its manifest ({_listed(wrong)}); copy it again or make it again")
    return digest


def _expected(manifest: Path) -> dict[str, Any]:
    try:
        files = json.loads(manifest.read_bytes())["files"]
    except (ValueError, TypeError, KeyError, RecursionError):
        files = None
    if not isinstance(files, dict):
        raise ArtifactError(f"{manifest} is no JSON object with the key 'files'; copy the folder again or make it again")
    return files


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(sanitize(name, 100) for name in names[:MAX_LISTED]) + more


def _files(folder: Path) -> dict[str, dict[str, str | int]]:
    own = {folder / MANIFEST, folder / COMMIT}
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path not in own)
    return {path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in paths}
