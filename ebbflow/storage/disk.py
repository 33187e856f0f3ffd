"""Writing to a disk: whole or not at all, a full disk as one error, and no name that leads out of
its folder.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath

from ebbflow.storage.locks import create_locked, try_lock

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_SPACE_TEXT = re.compile(
    r"No space left on device|[Qq]uota exceeded|File too large|database or disk is full"
)
"""How libraries of other languages pass on the same errors."""

logger = logging.getLogger(__name__)


class DiskFullError(Exception):
    """No space was left: names the path and the fix."""


class PathError(ValueError):
    """A name that would lead out of its folder, or a folder that is open to others: names them."""


def replace_durably(partial: Path, path: Path) -> None:
    """Move a file to ``path``, so that a power loss leaves the old or the new one, whole: without
    the wait, file systems may keep the new name of a file of length 0.
    """
    sync_path(partial)
    partial.replace(path)
    sync_path(path.parent)


@contextmanager
def atomic_write(
    path: Path,
    create: Callable[[Path], object] = Path.touch,
    publish: Callable[[Path, Path], object] = replace_durably,
) -> Iterator[Path]:
    """Yield an empty file beside ``path`` to write into; when the block ends it becomes ``path``.

    An exception leaves nothing behind and whatever was at ``path`` as it was. What a killed process
    left behind is removed by the next one that writes the same path.

    Args:
        create: makes the empty file (``Path.mkdir``: a folder).
        publish: moves it to ``path``.

    Raises:
        DiskFullError: no space was left.
    """
    remove_stale_partials(path)
    # In the same folder, and so on the same file system: only there is a rename atomic.
    partial = _path_of_partial(path, os.getpid())
    remove_path(partial)
    try:
        with raise_if_disk_full(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # The lock tells the next process that this one still lives; the kernel releases it
            # however this one ends.
            with create_locked(partial, create):
                yield partial
                publish(partial, path)
    finally:
        remove_path(partial)


def _path_of_partial(path: Path, process: int) -> Path:
    # What is stale is removed by its name, which a user's own file must not have by chance.
    checksum = hashlib.sha256(f"ebbflow {path.name} {process}".encode()).hexdigest()[:8]
    return path.with_name(f".{path.name}.partial-{process}-{checksum}")


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all.

    Raises:
        DiskFullError: no space was left.
    """
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def remove_stale_partials(path: Path) -> None:
    """Remove what ``atomic_write`` left beside ``path`` in a process that was killed; it would fill
    the disk.
    """
    for partial in path.parent.glob(f".{glob.escape(path.name)}.partial-*"):
        match = re.fullmatch(r".*\.partial-(\d+)-\w{8}(-old)?", partial.name, re.DOTALL)
        if not match or partial.name.removesuffix("-old") != (
            _path_of_partial(path, int(match[1])).name
        ):
            continue
        # OSError: another process removed it first.
        with suppress(OSError), try_lock(partial) as is_abandoned:
            if is_abandoned:
                remove_path(partial)
                logger.info("removed %s, which a killed process left behind", partial)


def remove_path(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    # Of a link only the link goes, never what it names.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    """Wait until a file or a folder would survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def raise_if_disk_full(path: Path) -> Iterator[None]:
    """Turn every error about missing space, of any library, into one.

    Raises:
        DiskFullError: no space was left to write ``path``.
    """
    try:
        yield
    except DiskFullError:
        raise  # of a write inside this one, which has named its own path
    except Exception as error:
        # Python's own errors have a number; those of safetensors (Rust), Arrow (C++) and SQLite
        # have nothing but their text.
        has_no_space = getattr(error, "errno", None) in NO_SPACE
        if not has_no_space and not NO_SPACE_TEXT.search(str(error)):
            raise
        existing = next(folder for folder in path.absolute().parents if folder.exists())
        free = shutil.disk_usage(existing).free / 2**20
        raise DiskFullError(
            f"{path} could not be written: the disk is full, or a quota or file size limit is"
            f" reached ({free:,.0f} MiB free); free space and start again. Nothing partial was left"
        ) from error


def create_private_folder(parent: Path | None = None) -> Path:
    """``ebbflow-USERID`` in a folder that all users may write to; default: the temporary folder.

    Only this user can open it, so nobody else can put anything, or a link, at a name in it that can
    be guessed.

    Raises:
        PathError: another user made it first, or others may open it.
    """
    folder = (parent or Path(tempfile.gettempdir())) / f"ebbflow-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # lstat, not stat: another user may have put a link there that leads to a folder of this user.
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_own or status.st_mode & 0o077:
        raise PathError(
            f"{folder} is not a folder of user {os.getuid()} alone"
            f" ({stat.filemode(status.st_mode)}, owner {status.st_uid}): another user may have put"
            " something into it; remove it, or set TMPDIR to a folder of your own"
        )
    return folder


@contextmanager
def open_scratch_folder(name: str) -> Iterator[Path]:
    """An empty folder on this machine, which is removed with its files when the block ends; at most
    one of a name in a process.

    What a killed process left behind is removed by the next one that asks for the same name.

    Raises:
        DiskFullError: no space was left.
    """
    # A partial that is never published: atomic_write removes it, and those of killed processes.
    path = create_private_folder() / name
    with atomic_write(path, Path.mkdir, publish=lambda partial, path: None) as folder:
        yield folder


def path_of_scratch_folder(name: str, process: int) -> Path:
    """Where ``open_scratch_folder`` puts the folder of the process with this number."""
    return _path_of_partial(create_private_folder() / name, process)


def safe_join(folder: Path, name: str) -> Path:
    """``folder / name`` for a name that comes from elsewhere.

    Raises:
        PathError: it is absolute, empty, contains ``..`` or a backslash, or leads through a link
            out of the folder.
    """
    # Backslashes and drives are harmless here, but would lead out of the folder on Windows.
    plain = name and "\\" not in name and "\0" not in name and not PureWindowsPath(name).drive
    if not plain or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise PathError(
            f"{name!r} is no file name below {folder}; remove '..', backslashes and the leading"
            " slash"
        )
    # The unresolved path is returned, because callers name it in errors and compare it.
    resolve_inside(folder, name)
    return folder / name


def resolve_inside(folder: Path, path: str) -> Path:
    """Where a path, absolute or relative to ``folder``, leads through all links.

    Raises:
        PathError: not into the folder.
        OSError, ValueError: no path can look like that.
    """
    root = os.path.realpath(folder)
    resolved = Path(os.path.realpath(os.path.join(root, path)))
    if not resolved.is_relative_to(root):
        raise PathError(f"{path!r} leads out of {folder}; put the file itself there")
    return resolved


def sha256_of_file(path: Path) -> str:
    """The sha256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
