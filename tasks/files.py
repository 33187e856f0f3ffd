"""Where tasks put what they make, and how they get at what others made."""

from __future__ import annotations

import fcntl
import hashlib
import tempfile
from pathlib import Path

from flytekit import FlyteContextManager
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile


def scratch(name: str) -> Path:
    """A fresh path called ``name``; Flyte uploads it when the task returns it."""
    return Path(tempfile.mkdtemp(prefix="ebbflow-")) / name


def fetch(artifact: FlyteFile | FlyteDirectory) -> Path:
    """The local copy of an artifact.

    Raises:
        FileNotFoundError: it is gone, which happens when Flyte's local cache outlives the temporary folder it points to.
    """
    path = Path(artifact.download())
    if not path.exists():
        raise FileNotFoundError(f"{path} is gone, but Flyte's local cache still points to it; run `pyflyte local-cache clear`")
    return path


def on_this_machine(uri: str) -> Path:
    """The folder at ``uri``, brought to this machine once for all processes that ask for it."""
    if Path(uri).is_dir():
        return Path(uri)
    folder = Path(tempfile.gettempdir()) / f"ebbflow-{hashlib.sha256(uri.encode()).hexdigest()[:32]}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = Path(tempfile.mkdtemp(prefix="ebbflow-"))
            FlyteContextManager.current_context().file_access.get_data(uri, str(unfinished), is_multipart=True)
            unfinished.replace(folder)
    return folder
