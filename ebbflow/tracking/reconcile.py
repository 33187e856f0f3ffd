"""The MLflow status of runs that ended without saying so: killed with SIGKILL, aborted in Flyte's
console, or failed outside of this code. MLflow shows them as RUNNING for ever.

A local run is over when nobody holds the lock of its folder. What became of an execution of Flyte
only Flyte knows, so its caller asks.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlflow import MlflowClient
from mlflow.entities import Run

from ebbflow.storage.locks import LOCK, try_lock
from ebbflow.tracking.store import (
    EXECUTION,
    FOLDER,
    MACHINE,
    PARENT,
    ROLE,
    find_run,
    find_sqlite_file,
)

logger = logging.getLogger(__name__)
ENDED_BY = "ebbflow.ended_by"
"""The tag of a run whose status was set here: why."""
START_SECONDS = 3600
"""A run that has no folder after so long was killed before it made one."""
PAGE = 1000

Status = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Example:
        ``Ending("KILLED", "Flyte: ABORTED")``
    """

    status: Status
    reason: str


def end_dead_runs(
    client: MlflowClient,
    experiment_ids: list[str],
    find_ending: Callable[[str], Ending | None] | None = None,
) -> list[tuple[Run, Ending]]:
    """Set the status of the runs that MLflow shows as RUNNING although they are over, and of their
    nodes.

    Args:
        find_ending: says how the execution "project/domain/name" of Flyte has ended, None if it
            runs or is unknown. Without it executions of Flyte are left alone.

    Returns:
        the runs and their endings.
    """
    ended = []
    for run in _list_running(client, experiment_ids, f"tags.`{ROLE}` = 'execution'"):
        execution = run.data.tags.get(EXECUTION)
        if execution is None:
            ending = _find_local_ending(client, run)
        else:
            ending = find_ending(execution) if find_ending else None
        if ending:
            end_run(client, run, ending)
            ended.append((run, ending))
    return ended


def end_run(client: MlflowClient, run: Run, ending: Ending) -> None:
    """Set the status of a run, and of its nodes that MLflow still shows as RUNNING."""
    run_id = run.info.run_id
    nodes = _list_running(client, [run.info.experiment_id], f"tags.`{PARENT}` = '{run_id}'")
    for node in nodes:
        client.set_terminated(node.info.run_id, ending.status)
    client.set_tag(run_id, ENDED_BY, ending.reason)
    client.set_terminated(run_id, ending.status)
    logger.info("MLflow run %s: RUNNING -> %s (%s)", run_id, ending.status, ending.reason)


def remove_ending(client: MlflowClient, run: Run) -> None:
    """Remove what ``end_run`` said of a run that goes on after all."""
    if ENDED_BY in run.data.tags:
        client.delete_tag(run.info.run_id, ENDED_BY)


def _find_local_ending(client: MlflowClient, run: Run) -> Ending | None:
    """Find how a local run ended: None if it runs, or if only another machine or user could
    tell.
    """
    tags = run.data.tags
    # A run of an older Ebbflow has no tag of its folder.
    if tags.get(MACHINE) != platform.node() or "://" in tags.get(FOLDER, "://"):
        return None
    folder = Path(tags[FOLDER])
    lock = folder / LOCK
    try:
        # Another machine may have the same name: this one has no disk in common with it.
        if not folder.parent.is_dir():
            return None
        if lock.is_file():
            with try_lock(lock) as is_free:
                return Ending("KILLED", "its process is gone") if is_free else None
    except PermissionError:
        return None  # another user's
    # Containers of one machine, or machines of one name, may have other disks at the same path, and
    # share a server: the run's folder is theirs. A run without nodes never had one, anywhere.
    is_shared = find_sqlite_file(client.tracking_uri) is None
    if is_shared and find_run(client, run.info.experiment_id, {PARENT: run.info.run_id}):
        return None
    is_starting = time.time() - run.info.start_time / 1000 < START_SECONDS  # MLflow's are in ms
    return None if is_starting else Ending("KILLED", "its process is gone, and its folder, too")


def _list_running(client: MlflowClient, experiment_ids: list[str], condition: str) -> list[Run]:
    """List the runs with a condition that MLflow shows as RUNNING."""
    runs: list[Run] = []
    token = None
    while True:
        page = client.search_runs(
            experiment_ids,
            f"attributes.status = 'RUNNING' and {condition}",
            max_results=PAGE,
            page_token=token,
        )
        runs += page
        token = page.token
        if not token:
            return runs
