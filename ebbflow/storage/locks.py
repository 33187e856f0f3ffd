"""One process at a time, by ``flock``: a lock ends with its process, however that dies, and leaves
nothing to clean up.
"""

from __future__ import annotations

import fcntl
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

LOCK = ".lock"


class FolderInUseError(RuntimeError):
    """Another process works in the folder: names it, its machine and the fix."""


@contextmanager
def lock_folder(folder: Path, fix: str = "wait until it ends, or stop it") -> Iterator[None]:
    """Lock ``folder``, which is made if need be, until the block ends.

    Over NFS the lock also holds between machines. A file system without locks causes a warning.

    Raises:
        FolderInUseError: another process has the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Appending, so that the holder's name survives until this process has the lock itself.
    with (folder / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise FolderInUseError(
                f"{folder} is in use by {lock.read() or 'another process'}; {fix}"
            ) from None
        except OSError as error:
            warnings.warn(
                f"{folder} cannot be locked ({error.strerror}): nothing keeps a second process out",
                stacklevel=3,
            )
        # For the error of the next process, which cannot see processes of other machines.
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield


@contextmanager
def wait_for_lock(file: Path) -> Iterator[None]:
    """Wait for the lock on ``file``, which is made if need be, and keep it until the block ends.

    Who has the lock may remove the file; who waited for it then takes the lock on the next one.
    """
    while True:
        with file.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The lock is on the open file, not on its name. If its last holder removed the file,
            # another process may lock a new one of that name at the same time.
            if _is_file_at_path(file, lock.fileno()):
                yield
                return


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Lock an existing file or folder until the block ends; yields whether that succeeded."""
    # os.open, because open() refuses folders. Closing the descriptor releases the lock.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        except OSError:
            is_locked = False
        yield is_locked and _is_file_at_path(path, descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def create_locked(path: Path, create: Callable[[Path], object]) -> Iterator[None]:
    """Create a file or a folder and lock it until the block ends.

    Between the two, another process may lock it first, take it for abandoned and remove it; then it
    is created again. A file system without locks keeps nobody out.
    """
    while True:
        create(path)
        with ExitStack() as stack:
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue
            stack.callback(os.close, descriptor)
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_file_at_path(path, descriptor):
                yield
                return


def _is_file_at_path(path: Path, descriptor: int) -> bool:
    """Whether an open file is still the one at its path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
