"""What every process of a task does that generates on all GPUs of its pod."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe

if TYPE_CHECKING:
    from ebbflow.tracking.child_run import RunLogger

GENERATION_TIMEOUT = timedelta(days=1)
"""How long a rank waits for another. One that has no micro-batch in the last round waits as long as
that takes, which for videos is more than the half hour of a training group. The launcher ends the
ranks when one of them dies, heartbeats name one that stands still, and ``max_hours`` ends the pod.
"""


@contextmanager
def join_generating_group(recipe: Recipe) -> Iterator[None]:
    """Join the processes of the task's pod that the environment announces; alone without them."""
    from ebbflow.compute import set_up_process
    from ebbflow.training.distributed import enter_phase, join_process_group

    # Before anything is allocated: a rank without its GPU ends here.
    set_up_process(recipe)
    # Pixels, scores and rows travel, and all of them lie in main memory: no GPU talks to another.
    with join_process_group(backend="gloo", timeout=GENERATION_TIMEOUT):
        enter_phase("generating")
        yield


def open_node_run_once(run: TrackedRun, node: str) -> AbstractContextManager[RunLogger | None]:
    """Open the run of a node in MLflow on rank 0, as ``open_node_run``; MLflow has one writer."""
    from ebbflow.tracking.child_run import open_node_run
    from ebbflow.training.distributed import Ranks

    return open_node_run(run, node) if Ranks.current().rank == 0 else nullcontext()
