"""The logs of a Ray cluster, collected before it is gone: those of its actors lie on the disks of
its machines.
"""

from __future__ import annotations

import io
import logging
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray._private import worker
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

MAX_FILE_BYTES = 16 * 2**20
"""Of each file the end is kept: an actor that prints in a loop would fill the store."""
COLLECT_SECONDS = 60

logger = logging.getLogger(__name__)


def pack_session_logs() -> bytes:
    """Pack the logs of Ray's session on this machine as a .tar.gz; called in a process of Ray."""
    # Ray has no public way to ask, and its folder depends on several variables.
    node: Any = worker._global_node
    folder = Path(node.get_logs_dir_path())
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path in sorted(folder.rglob("*")):
            if not path.is_file():
                continue
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - MAX_FILE_BYTES))
                # Read once: the file grows meanwhile, and its size must be that of the text.
                text = file.read(MAX_FILE_BYTES)
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    return packed.getvalue()


def save_cluster_logs(save: Callable[[str, bytes], None]) -> None:
    """Save the logs of every machine of the cluster. A machine that does not answer is named in a
    warning: logs are not worth the stage.

    Args:
        save: writes a file, by its name.
    """
    try:
        collect = ray.remote(num_cpus=0, max_retries=0)(pack_session_logs)
        hosts = {}
        for node in ray.nodes():
            if node["Alive"]:
                on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                packed = collect.options(scheduling_strategy=on_node).remote()
                # Not the id of the node, which nobody knows.
                hosts[packed] = node["NodeManagerHostname"]
        # All at once: a machine that has just died takes the whole time.
        answered, _ = ray.wait(list(hosts), num_returns=len(hosts), timeout=COLLECT_SECONDS)
    except Exception as error:
        logger.warning("cannot collect the logs of the Ray cluster: %s", error)
        return
    for packed, host in hosts.items():
        if packed not in answered:
            logger.warning("%s has not sent its logs in %d s", host, COLLECT_SECONDS)
            continue
        try:
            save(f"{host}.tar.gz", ray.get(packed))
        except Exception as error:
            logger.warning("cannot keep the logs of %s: %s", host, error)
