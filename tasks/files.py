"""Where tasks put what they make, and how they get at what others made."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flytekit import FlyteContextManager
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.records import TrackedRun

if TYPE_CHECKING:
    from ebbflow.online.standing import Checkpoints
    from ebbflow.stage import Place


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


def fetch_folder(uri: str) -> Path:
    """The folder at a path or a URI that a recipe names; a FlyteDirectory made from a URI would download nothing."""
    if "://" not in uri:
        return fetch(FlyteDirectory(uri))
    folder = scratch("folder")
    FlyteContextManager.current_context().file_access.get_data(uri, str(folder), is_multipart=True)
    return folder


def on_this_machine(uri: str) -> Path:
    """The folder at ``uri``, brought to this machine once for all processes that ask for it."""
    if Path(uri).is_dir():
        return Path(uri)
    folder = Path(tempfile.gettempdir()) / f"ebbflow-{hashlib.sha256(uri.encode()).hexdigest()[:32]}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            fetch_folder(uri).replace(folder)
    return folder


@contextmanager
def kept_checkpoints(run: TrackedRun, place: Place) -> Iterator[Checkpoints]:
    """The checkpoints of a stage, in the run's own folder: there the next attempt finds them. Gone once the stage is over."""
    from ebbflow.online.standing import Checkpoints

    home = f"{run.folder}/checkpoints/{place.label.replace(' ', '-')}"
    if "://" not in home:
        yield Checkpoints(place, Path(home))
        shutil.rmtree(home, ignore_errors=True)
        return
    access, folder = FlyteContextManager.current_context().file_access, scratch("checkpoints")
    store = access.get_filesystem_for_path(home)

    def saved(new: Path) -> None:
        access.put_data(str(new), f"{home}/{new.name}", is_multipart=True)
        for name in {Path(path).name for path in store.ls(home, detail=False)} - {path.name for path in folder.iterdir()}:
            store.rm(f"{home}/{name}", recursive=True)

    if store.exists(home):
        access.get_data(home, str(folder), is_multipart=True)
    yield Checkpoints(place, folder, saved)
    if store.exists(home):
        store.rm(home, recursive=True)
