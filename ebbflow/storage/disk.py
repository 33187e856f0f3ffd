"""Writes to a disk: a full one is an error that names the place, what is unfinished never looks whole and does not stay for ever,
and names from elsewhere cannot lead out of a folder."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SAID = re.compile(r"No space left on device|[Qq]uota exceeded|File too large")
"""How libraries of other languages pass on the same errors, as text."""


class DiskFullError(Exception):
    """What was to be written has no room: names the place and the way out."""


class PathError(ValueError):
    """A name that would lead out of its folder: names both."""


@contextmanager
def room_for(place: Path) -> Iterator[None]:
    """Whatever tells of a full disk while ``place`` is written becomes one error.

    Raises:
        DiskFullError: no room was left.
    """
    try:
        yield
    except Exception as error:
        if not _is_about_room(error):
            raise
        raise DiskFullError(
            f"{place} could not be written: the disk is full, or a quota or a limit on file sizes is reached "
            f"({_free(place)} free); make room there and start again. Nothing unfinished was left"
        ) from error


def _is_about_room(error: BaseException) -> bool:
    if isinstance(error, DiskFullError):
        return False
    return getattr(error, "errno", None) in NO_ROOM or bool(SAID.search(str(error)))


def _free(place: Path) -> str:
    there = next(folder for folder in place.absolute().parents if folder.exists())
    return f"{shutil.disk_usage(there).free / 2**20:,.0f} MiB"


def inside(folder: Path, name: str) -> Path:
    """``folder / name`` for a name that somebody else gave.

    Raises:
        PathError: it is absolute, empty, has ``..`` or a backslash in it, or leads out of the folder through a link.
    """
    plain = name and "\\" not in name and "\0" not in name and not PureWindowsPath(name).drive
    if not plain or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise PathError(f"{name!r} is no name of a file below {folder}; give one without .., backslashes or a leading slash")
    path = folder / name
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise PathError(f"{name!r} leads out of {folder} through a link; put the file itself there")
    return path


def unfinished_name(path: Path) -> Path:
    """Where this process writes what will be ``path``, beside it."""
    return path.with_name(f".{path.name}.unfinished-{os.getpid()}")


@contextmanager
def claimed(unfinished: Path) -> Iterator[None]:
    """Hold a lock on a file or a folder, which ends with the process however it ends; a file system without locks has none."""
    descriptor = os.open(unfinished, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def remove_abandoned(path: Path) -> None:
    """Remove what lies unfinished beside ``path`` and is no living process's: it would stay and fill the disk."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.unfinished-*"):
        with suppress(OSError):  # not there any more, locked, or on a file system that cannot say
            descriptor = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if left.is_dir():
                    shutil.rmtree(left)
                else:
                    left.unlink()
            finally:
                os.close(descriptor)
