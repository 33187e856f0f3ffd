"""A node of a training group. Arguments: a folder with an offline stage in it, the name of the
result, and how node 1 dies.

The folder has ``stage.json`` and the files of tests/pipeline/test_nodes.py; the store of
checkpoints is a folder behind a URI, so that every node downloads them into its own temporary
folder. ``said-NODE`` gets what the launcher raised.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.extend import IgnoreOutputs

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.elastic import GracefulElastic
from tasks.files import open_checkpoints
from tasks.preemption import retry_on_errors

GROUP = GracefulElastic(
    nnodes=2,
    nproc_per_node=int(os.environ.get("PER_NODE", "1")),
    monitor_interval=0.1,
    max_restarts=0,
    increase_shared_mem=False,
)


@task(task_config=GROUP)
def train(recipe: Recipe, folder: str, name: str, dies: str) -> str:
    from ebbflow.compute import set_up_process
    from ebbflow.offline.training import train_offline_folder
    from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
    from ebbflow.training.distributed import PeerLost, join_process_group
    from ebbflow.training.stop_conditions import Preempted

    set_up_process(recipe)
    ctx = StageContext(recipe, 0, 1)
    here = Path(folder)
    recorder = MetricsRecorder()
    with retry_on_errors(Preempted, PeerLost), join_process_group() as ranks:
        if dies and ranks.node_rank == 1:
            end_at(int(dies.partition(" ")[0]), dies.partition(" ")[2])
        checkpoints = open_checkpoints(tracked(here, name), ctx, ranks.rank, ranks.local_rank)
        ranks.wait_for_all()
        base = Path((here / "base").read_text())
        replicas = ranks.num_nodes if "HYBRID" in os.environ else 1
        train_offline_folder(
            ctx,
            StageFolders(base, here / "start", here / "prompts.parquet", here / name),
            sorted(here.glob("rollouts-*")),
            here / "advantages.parquet",
            recorder,
            checkpoints,
            replicas,
        )
    return json.dumps([row["loss"] for row in recorder.metrics_rows])


def tracked(folder: Path, name: str) -> TrackedRun:
    return TrackedRun.model_construct(folder=f"file://{folder}/{name}-run")


def end_at(step: int, how: str) -> None:
    """Have this process end as its update of this number begins: with its whole node, or as a
    preempted one.
    """
    from ebbflow.training.update import PolicyUpdater

    update = PolicyUpdater.update_policy

    def doomed(updater: PolicyUpdater, *arguments: object) -> dict[str, float]:
        if updater.updates == step:
            if how == "error":
                raise ValueError("of its own")
            os.killpg(0, signal.SIGKILL) if how == "killed" else os.kill(
                os.getpid(), signal.SIGTERM
            )
        return update(updater, *arguments)  # type: ignore[arg-type]

    PolicyUpdater.update_policy = doomed  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    folder, name, node, dies = sys.argv[1:]
    recipe = Recipe.model_validate_json((Path(folder) / "stage.json").read_text())
    said = "done"
    try:
        train.execute(recipe=recipe, folder=folder, name=name, dies=dies)
    except (FlyteRecoverableException, IgnoreOutputs) as error:
        said = f"{type(error).__name__} {error}"
    except Exception as error:
        said = f"{type(error).__name__} {error}"
    (Path(folder) / f"said-{name}-{node}").write_text(said)
