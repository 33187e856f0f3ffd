"""A launcher with one rank that says where it is and then waits. Arguments: the file that it writes
to, and how the rank starts (forkserver, spawn).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

from ebbflow.recipe import Recipe
from tasks import elastic


def rank(said: str) -> None:
    about = {
        "rank": os.getpid(),
        "server": os.getppid(),
        "folder": os.getcwd(),
        "LATE": os.environ.get("LATE"),
    }
    Path(said).with_suffix(".new").write_text(
        json.dumps(about | {"imported": "torch" in sys.modules})
    )
    Path(said).with_suffix(".new").rename(said)
    time.sleep(600)


# Here and not below, because a spawned rank imports this file again.
elastic.SPAWN_HELPER = rank

if __name__ == "__main__":
    said, method = sys.argv[1:]
    if method == "spawn":
        elastic.preload_fork_server = lambda recipe: False  # as with CUDA
    else:
        assert elastic.preload_fork_server(Recipe())
        assert elastic.preload_fork_server(Recipe()), "the second time there is one"
    os.environ["LATE"] = "after the server"
    with elastic._configure_launcher(Recipe(), {}):
        context = multiprocessing.get_context(method)
        context.Process(target=elastic.plugin.spawn_helper, args=(said,)).start()
        time.sleep(600)
