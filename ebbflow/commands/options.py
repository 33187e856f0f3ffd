"""Options and messages that several commands have."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ebbflow.compute import count_local_processes


def _count_processes_of_all_nodes() -> str:
    """Count the training processes as local runs and registering take them from the environment:
    processes of a node, times nodes.
    """
    # click calls this for the default, so the environment is read when the command runs.
    per_node = os.environ.get("EBBFLOW_TRAIN_PROCESSES") or str(count_local_processes())
    nodes = os.environ.get("EBBFLOW_TRAIN_NODES", "1")
    if per_node.isdigit() and nodes.isdigit():
        return str(int(per_node) * int(nodes))
    return per_node  # click refuses it, and its error shows the value


PROCESSES = click.option(
    "--processes",
    default=_count_processes_of_all_nodes,
    show_default="one for each GPU, 2 without one; or EBBFLOW_TRAIN_PROCESSES times"
    " EBBFLOW_TRAIN_NODES",
    type=click.IntRange(min=1),
    help="Training processes of an offline stage, those of all nodes.",
)
STORE = click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    help="The recipe whose MLflow store it is; left out, MLFLOW_TRACKING_URI or runs/mlflow.db.",
)
LOADING = "loading torch, diffusers and MLflow, which takes seconds"
"""What a command logs before it imports them."""
