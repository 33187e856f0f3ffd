"""Options that several commands have."""

from __future__ import annotations

import os
from pathlib import Path

import click


def _count_processes_of_all_nodes() -> str:
    """What local runs and registering take from the environment, where each counts its own:
    processes of a node, and nodes.
    """
    per_node, nodes = (
        os.environ.get(f"EBBFLOW_TRAIN_{name}", default)
        for name, default in (("PROCESSES", "2"), ("NODES", "1"))
    )
    return str(int(per_node) * int(nodes)) if per_node.isdigit() and nodes.isdigit() else per_node


PROCESSES = click.option(
    "--processes",
    default=_count_processes_of_all_nodes,
    show_default="2, or EBBFLOW_TRAIN_PROCESSES times EBBFLOW_TRAIN_NODES",
    type=click.IntRange(min=1),
    help="Training processes of an offline stage, those of all nodes.",
)
STORE = click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    help="The recipe whose MLflow store it is; left out, MLFLOW_TRACKING_URI or runs/mlflow.db.",
)
