"""Options and messages that several commands have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from ebbflow.compute import count_local_processes
from ebbflow.recipe import RecipeError
from ebbflow.recipe.output_folder import refuse_root_folder


class OutputPath(click.Path):
    """A path that a command writes; a relative one is refused in ``/``, as the runs' folder is."""

    def __init__(self, **checks: bool) -> None:
        super().__init__(path_type=Path, **checks)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; refuse a relative one in ``/``, by the name of its option."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        try:
            refuse_root_folder(path, param.human_readable_name if param else "the path")
        except RecipeError as error:
            self.fail(str(error), param, ctx)
        return path


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
