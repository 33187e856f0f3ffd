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

MANIFEST, COMMIT = "manifest.json", "COMMIT"


class ArtifactError(Exception):
    """An artifact that is not whole: names the folder, what does not fit and the way out."""


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write into; at the end it is committed and takes the place of ``folder``.

    An exception leaves nothing behind, and whatever stood at ``folder`` before stays as it was.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        commit(unfinished)
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def commit(folder: Path) -> None:
    """Write the manifest of everything in ``folder`` and then its COMMIT."""
    manifest = json.dumps({"files": _files(folder)}, indent=2, sort_keys=True)
    (folder / MANIFEST).write_text(manifest)
    (folder / COMMIT).write_text(_sha256(folder / MANIFEST))


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
    expected = json.loads((folder / MANIFEST).read_text())["files"]
    found = _files(folder)
    if expected != found:
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise ArtifactError(f"{folder} does not fit its manifest ({', '.join(wrong)}): copy it again or make it again")
    return digest


def _files(folder: Path) -> dict[str, dict[str, str | int]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path not in _own(folder))
    return {path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in paths}


def _own(folder: Path) -> set[Path]:
    return {folder / MANIFEST, folder / COMMIT}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
