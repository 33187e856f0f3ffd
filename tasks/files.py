"""Where tasks put what they make, and how they get at what others made."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flytekit import FlyteContextManager
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.storage.locks import wait_for_lock
from tasks.types import GONE

if TYPE_CHECKING:
    from ebbflow.stage import Place
    from ebbflow.training.checkpoint import Checkpoints


def scratch(name: str, run: TrackedRun | None = None) -> Path:
    """A fresh path called ``name``; Flyte uploads it when the task returns it.

    Without a cluster Flyte leaves it where it is. Then it is in the folder of ``run``, if given, to last as long as the run.
    """
    place = None if run is None or "://" in run.folder else Path(run.folder) / "nodes"
    if place:
        place.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="ebbflow-", dir=place)) / name


def fetch(artifact: FlyteFile | FlyteDirectory) -> Path:
    """The local copy of an artifact.

    Raises:
        FileNotFoundError: it is gone, which happens when Flyte's local cache outlives the temporary folder it points to.
    """
    path = Path(artifact.download())
    if not path.exists():
        raise FileNotFoundError(GONE.format(path))
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
    folder = _of_this_machine(uri)
    with wait_for_lock(folder.with_suffix(".lock")):
        if not folder.exists():
            fetch_folder(uri).replace(folder)
    return folder


def kept_checkpoints(run: TrackedRun, place: Place, first: bool = True) -> Checkpoints:
    """The checkpoints of a stage, in the run's own folder: there the next attempt finds them. Those of other stages are over.

    ``first``: of the processes of this machine that ask for them; it brings them here, the others wait for it.
    """
    from ebbflow.training.checkpoint import Checkpoints

    access, stages, own = FlyteContextManager.current_context().file_access, f"{run.folder}/checkpoints", _folder_of(place)
    store = access.get_filesystem_for_path(stages)
    for stage in _names(store, stages) if first else ():
        if stage != own:
            store.rm(f"{stages}/{stage}", recursive=True)
    home = f"{stages}/{own}"
    if "://" not in home:
        return Checkpoints(place, Path(home))
    folder = _of_this_machine(home)

    def saved(new: Path) -> None:
        access.put_data(str(new), f"{home}/{new.name}", is_multipart=True)
        for name in _names(store, home) - {path.name for path in folder.iterdir()}:
            store.rm(f"{home}/{name}", recursive=True)

    if first:
        shutil.rmtree(folder, ignore_errors=True)  # an attempt before this one was on the same machine
        if store.exists(home):
            access.get_data(home, str(folder), is_multipart=True)
    return Checkpoints(place, folder, saved)


def forget_checkpoints(run: TrackedRun) -> None:
    """Remove those of the last stage: the run is over."""
    folder = f"{run.folder}/checkpoints"
    store = FlyteContextManager.current_context().file_access.get_filesystem_for_path(folder)
    if store.exists(folder):
        store.rm(folder, recursive=True)


def _of_this_machine(uri: str) -> Path:
    """Where all processes of this machine have what is at ``uri``."""
    return Path(tempfile.gettempdir()) / f"ebbflow-{hashlib.sha256(uri.encode()).hexdigest()[:32]}"


def _folder_of(place: Place) -> str:
    return place.label.replace(" ", "-")


def _names(store: Any, folder: str) -> set[str]:
    return {Path(path).name for path in store.ls(folder, detail=False)} if store.exists(folder) else set()
