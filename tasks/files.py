"""Where tasks put what they make, and how they get at what others made."""

from __future__ import annotations

import tempfile
from pathlib import Path

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
