"""A launcher with one rank that says where it is and then waits. Arguments: the file that it writes
to.
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


if __name__ == "__main__":
    elastic.SPAWN_HELPER = rank
    assert elastic.preload_fork_server(Recipe())
    assert elastic.preload_fork_server(Recipe()), "the second time there is one"
    os.environ["LATE"] = "after the server"
    given = (os.getcwd(), dict(os.environ), sys.argv[1])
    multiprocessing.get_context("forkserver").Process(target=elastic._run_rank, args=given).start()
    time.sleep(600)
