"""Files of tasks: places for outputs; inputs, folders behind URIs and checkpoints, fetched."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flytekit import FlyteContextManager
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe.paths import resolve_local_path
from ebbflow.storage.disk import create_private_folder, remove_path, remove_stale_partials
from ebbflow.storage.locks import wait_for_lock
from tasks.types import GONE

if TYPE_CHECKING:
    from ebbflow.stage import AnchorFiles, StageContext
    from ebbflow.training.checkpoint import Checkpoints


def make_scratch_path(name: str) -> Path:
    """Make a fresh path called ``name`` in the temporary folder; Flyte uploads it when the task
    returns it.
    """
    return Path(tempfile.mkdtemp(prefix="ebbflow-")) / name


def make_node_output(run: TrackedRun, node: str, name: str) -> Path:
    """Make a fresh path for what a node of the run makes; Flyte uploads it when the task returns
    it.

    A local execution leaves it where it is, in the run's folder. Every attempt at the node gets the
    same path, and what one that was killed left there is removed. Every process of a training group
    calls this before any of them writes.
    """
    if "://" in run.folder:
        return make_scratch_path(name)
    path = Path(run.folder) / "nodes" / _folder_name(node) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_path(path)
    remove_stale_partials(path)
    return path


def mark_node_started(run: TrackedRun, node: str) -> None:
    """Make the folder of a node whose output lies elsewhere: `ebbflow runs` takes the newest folder
    for the node that is under way.
    """
    if "://" not in run.folder:
        folder = Path(run.folder) / "nodes" / _folder_name(node)
        folder.mkdir(parents=True, exist_ok=True)
        # Also on a retry.
        os.utime(folder)


def fetch_artifact(artifact: FlyteFile | FlyteDirectory) -> Path:
    """Fetch the local copy of an artifact.

    Raises:
        FileNotFoundError: Flyte's local cache has outlived the temporary folder it points to.
    """
    path = Path(artifact.download())
    if not path.exists():
        raise FileNotFoundError(GONE.format(path))
    return path


def fetch_folder(uri: str) -> Path:
    """Fetch a local copy of the folder at a path or a URI."""
    if "://" not in uri:
        return fetch_artifact(FlyteDirectory(uri))
    # Not FlyteDirectory(uri).download(): one that was made from a URI downloads nothing.
    folder = make_scratch_path("folder")
    FlyteContextManager.current_context().file_access.get_data(uri, str(folder), is_multipart=True)
    return folder


def fetch_prompt_file(source: str) -> Path:
    """Fetch the local copy of a file of ``prompts``, which a recipe names by a path or a URI."""
    # A relative path may lie beside the recipe or in the package; Flyte knows neither.
    if "://" in source:
        return fetch_artifact(FlyteFile(source))
    return Path(resolve_local_path(source))


def fetch_data(source: str) -> Path:
    """Fetch the local copy of a file of pairs, or of a file or folder of captioned data."""
    # Folders have no suffix of a table; a local path needs no copy.
    is_file = source.lower().endswith((".parquet", ".jsonl"))
    return fetch_prompt_file(source) if is_file or "://" not in source else fetch_folder(source)


def fetch_anchor(
    tables: list[FlyteFile] | None, latents: list[FlyteFile] | None
) -> AnchorFiles | None:
    """Fetch the data of a stage's anchor: prompts and advantages, and shards of latents; None for a
    stage without one.
    """
    from ebbflow.stage import AnchorFiles

    if not tables or not latents:
        return None
    prompts, advantages = map(fetch_artifact_once, tables)
    return AnchorFiles(prompts, advantages, [fetch_artifact_once(shard) for shard in latents])


def fetch_artifact_once(artifact: FlyteFile | FlyteDirectory) -> Path:
    """Fetch the local copy of an artifact that all processes of this machine share.

    It is downloaded once: a process that downloaded it again would write into the file that another
    one reads.
    """
    uri = str(artifact.remote_source or artifact.path)
    if "://" in uri:
        return fetch_once_per_machine(uri, is_folder=isinstance(artifact, FlyteDirectory))
    return fetch_artifact(artifact)


def fetch_once_per_machine(uri: str, is_folder: bool = True) -> Path:
    """Fetch the file or folder at ``uri``, which never changes, once for all processes of this
    machine.
    """
    if Path(uri).exists():
        return Path(uri)
    shared = _path_of_machine_folder(uri)
    with wait_for_lock(shared.with_suffix(".lock")):
        if not shared.exists():
            # Renamed when it is whole: a process that dies meanwhile leaves nothing under the name.
            new = make_scratch_path(shared.name)
            FlyteContextManager.current_context().file_access.get_data(
                uri, str(new), is_multipart=is_folder
            )
            new.replace(shared)
    return shared


def open_checkpoints(
    run: TrackedRun, ctx: StageContext, rank: int = 0, local_rank: int = 0
) -> Checkpoints:
    """Open the checkpoints of a stage, in the run's folder, where the next attempt finds them;
    those of earlier stages are deleted.

    Args:
        rank: of a training process; rank 0 deletes.
        local_rank: on its machine, for which 0 downloads them; the others must wait until it has.
    """
    from ebbflow.recipe.branches import find_stages_in_parallel
    from ebbflow.training.checkpoint import Checkpoints

    # Not Flyte's own checkpoints: an attempt sees only those of the attempt before it, they have no
    # mark of being whole, and another stage has none of them.
    access = FlyteContextManager.current_context().file_access
    stages = f"{run.folder}/checkpoints"
    stage_folder = _folder_name(ctx.stage_label)
    store = access.get_filesystem_for_path(stages)

    # A stage that runs has the policy of those before it, so their checkpoints are not needed any
    # more; stages of branches run at the same time.
    if rank == 0:
        parallel = find_stages_in_parallel(ctx.recipe.stages, ctx.stage)
        labels = [ctx.recipe.stage_label(ctx.round, index) for index in parallel]
        needed = {stage_folder, *map(_folder_name, labels)}
        for stage in _list_names(store, stages):
            if stage not in needed:
                store.rm(f"{stages}/{stage}", recursive=True)
    home = f"{stages}/{stage_folder}"
    if "://" not in home:
        return Checkpoints(ctx, Path(home))
    folder = _path_of_machine_folder(home)

    def upload_checkpoint(new: Path) -> None:
        # First the new one, then away with those that are gone here: there is always one to resume
        # from.
        access.put_data(str(new), f"{home}/{new.name}", is_multipart=True)
        for name in _list_names(store, home) - {path.name for path in folder.iterdir()}:
            store.rm(f"{home}/{name}", recursive=True)

    if local_rank == 0:
        # What an earlier attempt left on this machine may be older than what another one uploaded.
        shutil.rmtree(folder, ignore_errors=True)
        if store.exists(home):
            access.get_data(home, str(folder), is_multipart=True)
    return Checkpoints(ctx, folder, upload_checkpoint)


def save_run_file(run: TrackedRun, name: str, content: bytes) -> None:
    """Save a file in the run's folder, which is a URI."""
    store = FlyteContextManager.current_context().file_access.get_filesystem_for_path(run.folder)
    store.pipe_file(f"{run.folder}/{name.replace(' ', '-')}", content)


def describe_flyte() -> dict[str, str]:
    """Describe what this task runs in: Flyte's version and, in a pod, the image and the version
    under which the task was registered.
    """
    variables = {"image": "FLYTE_INTERNAL_IMAGE", "task_version": "FLYTE_INTERNAL_TASK_VERSION"}
    pod = {key: os.environ.get(variable, "") for key, variable in variables.items()}
    return {"flyte_version": version("flytekit")} | {
        key: value for key, value in pod.items() if value
    }


def delete_checkpoints(run: TrackedRun) -> None:
    """Delete the last stage's checkpoints, which nothing needs once the run is over."""
    folder = f"{run.folder}/checkpoints"
    store = FlyteContextManager.current_context().file_access.get_filesystem_for_path(folder)
    if store.exists(folder):
        store.rm(folder, recursive=True)


def _path_of_machine_folder(uri: str) -> Path:
    """Return the local folder that all processes of this machine use for what is at ``uri``."""
    # Private to this user: another one could put weights of his own under a name that is known.
    return create_private_folder() / hashlib.sha256(uri.encode()).hexdigest()[:32]


def _folder_name(label: str) -> str:
    """Return "1.2-offline" for "1.2 offline"."""
    return label.replace(" ", "-")


def _list_names(store: Any, folder: str) -> set[str]:
    """List the names in a folder of an fsspec file system; none where it does not exist."""
    if not store.exists(folder):
        return set()
    return {Path(path).name for path in store.ls(folder, detail=False)}
