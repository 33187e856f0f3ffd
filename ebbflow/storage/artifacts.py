"""Folders that are either whole or do not exist.

A folder is written beside its final place, gets ``manifest.json`` (files, sizes, sha256), then ``COMMIT`` (sha256 of the
manifest) last, and moves into place. Readers accept a folder only with a COMMIT that fits.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ebbflow.recipe.base import printable
from ebbflow.storage.disk import claimed, remove_abandoned, room_for, unfinished_name

MANIFEST, COMMIT = "manifest.json", "COMMIT"


class ArtifactError(Exception):
    """An artifact that is not whole: names the folder, what does not fit and the way out."""


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write into; at the end it is committed and takes the place of ``folder``.

    An exception leaves nothing behind, and whatever stood at ``folder`` before stays as it was. What a process that was killed
    left behind is removed by the next one that writes the same folder.

    Raises:
        DiskFullError: no room was left.
    """
    remove_abandoned(folder)
    unfinished = unfinished_name(folder)
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with room_for(folder):
            unfinished.mkdir(parents=True)
            with claimed(unfinished):
                yield unfinished
                commit(unfinished)
                _put_in_place(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _put_in_place(new: Path, folder: Path) -> None:
    """What stood there goes only once the new folder has its place."""
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
    """Write the manifest of everything in ``folder`` and then its COMMIT, each once what it speaks of is on the disk itself."""
    manifest = json.dumps({"files": _files(folder)}, indent=2, sort_keys=True)
    (folder / MANIFEST).write_text(manifest)
    for path in folder.rglob("*"):
        if path.is_file() or path.is_dir():
            _to_disk(path)
    (folder / COMMIT).write_text(_sha256(folder / MANIFEST))
    _to_disk(folder / COMMIT)
    _to_disk(folder)


def _to_disk(path: Path) -> None:
    """Wait until a file or a folder would survive a loss of power."""
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
        raise ArtifactError(f"{folder} has no COMMIT: it was never finished, or is no artifact of Ebbflow; make it again")
    digest = (folder / COMMIT).read_text(errors="replace").strip()
    if digest != _sha256(folder / MANIFEST):
        raise ArtifactError(f"{folder / MANIFEST} does not fit its COMMIT: the folder was damaged; make it again")
    expected, found = _expected(folder / MANIFEST), _files(folder)
    if expected != found:
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise ArtifactError(f"{folder} does not fit its manifest ({_listed(wrong)}): copy it again or make it again")
    return digest


def _expected(manifest: Path) -> dict[str, Any]:
    try:
        files = json.loads(manifest.read_bytes())["files"]
    except (ValueError, TypeError, KeyError, RecursionError):
        files = None
    if not isinstance(files, dict):
        raise ArtifactError(
            f"{manifest} is no JSON object with 'files', as Ebbflow writes it; copy the folder again or make it again"
        )
    return files


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(printable(name, 100) for name in names[:5]) + more


def _files(folder: Path) -> dict[str, dict[str, str | int]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path not in _own(folder))
    return {path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in paths}


def _own(folder: Path) -> set[Path]:
    return {folder / MANIFEST, folder / COMMIT}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
