"""One process at a time in a folder."""

from __future__ import annotations

import fcntl
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".lock"


class FolderInUse(RuntimeError):
    """Another process works in the folder: names it, its machine and the way out."""


@contextmanager
def held(folder: Path, way_out: str = "wait until it ends, or stop it") -> Iterator[None]:
    """Have ``folder``, which is made if need be, to oneself until the block ends, or the process: however it dies.

    The lock is the system's (flock), so it is no leftover that somebody has to remove, and it also holds between machines that
    share the folder over NFS. A file system without locks is warned of.

    Raises:
        FolderInUse: somebody else has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise FolderInUse(f"{folder} is in use by {lock.read() or 'another process'}; {way_out}") from None
        except OSError as error:
            warnings.warn(f"{folder} cannot be locked ({error.strerror}): nothing keeps a second process out of it", stacklevel=3)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield
