"""What each kind of task asks of a cluster, and how often it is retried. The one place that knows.

Deployments override a number by an environment variable when they register. Local runs ignore everything but the number of
training processes.
"""

from __future__ import annotations

import os
from typing import Any

from flytekit import Resources
from flytekitplugins.kfpytorch import Elastic

TRAIN_PROCESSES = int(os.environ.get("EBBFLOW_TRAIN_PROCESSES", "2"))
ON_GPUS = os.environ.get("EBBFLOW_GPUS", "0") != "0"
RETRIES = 2


def light() -> dict[str, Any]:
    """Bookkeeping: prompts, tracking, advantages, the gate."""
    return {"requests": _requests(cpu=1, mem="2Gi"), "retries": RETRIES}


def scorer() -> dict[str, Any]:
    """Rewards on the CPU."""
    return {"requests": _requests(cpu=2, mem="4Gi"), "retries": RETRIES}


def accelerated() -> dict[str, Any]:
    """One process that generates or trains, on a GPU where there are any."""
    return {"requests": _requests(cpu=2, mem="8Gi", gpus=1), "retries": RETRIES}


def training_group() -> dict[str, Any]:
    """``TRAIN_PROCESSES`` processes on one node under torch's elastic launcher.

    Spawned, because CUDA does not survive a fork. Not restarted inside the task: a restart would begin from the checkpoint of the
    attempt's start. Elastic must not add shared memory by itself: it would change a pod template that other tasks share.
    """
    config = Elastic(
        nnodes=1,
        nproc_per_node=TRAIN_PROCESSES,
        start_method="spawn",
        monitor_interval=1,
        max_restarts=0,
        increase_shared_mem=False,
    )
    return {
        "task_config": config,
        "requests": _requests(cpu=TRAIN_PROCESSES, mem="8Gi", gpus=TRAIN_PROCESSES),
        "shared_memory": True,
        # The launcher reads the number again inside the pod.
        "environment": {"EBBFLOW_TRAIN_PROCESSES": str(TRAIN_PROCESSES)},
        "retries": RETRIES,
    }


def _requests(cpu: int, mem: str, gpus: int = 0) -> Resources:
    return Resources(cpu=str(cpu), mem=mem, gpu=str(gpus) if gpus and ON_GPUS else None)
