"""The folder of a recipe's queue on this machine, and which turn is under way. It imports nothing
heavy: a turn asks first.
"""

from __future__ import annotations

import uuid
from pathlib import Path

from ebbflow.recipe import Recipe
from ebbflow.storage.disk import write_text
from ebbflow.storage.layout import QUEUES, TURN


def find_queue_folder(recipe: Recipe) -> Path:
    """Return where the queue and the bad cases of a recipe's last turn are on this machine."""
    root = Path("." if "://" in recipe.output else recipe.output)
    return root / QUEUES / recipe.name


def open_turn(recipe: Recipe) -> str:
    """Return what identifies the turn of a recipe that is under way on this machine, and begin one
    where none is.

    A turn ends after its run, with the next queue. So a turn that is started again needs to know
    its run also where that has ended: the run is tagged with the turn.
    """
    path = find_queue_folder(recipe) / TURN
    if path.is_file():
        return path.read_text().strip()
    # Random and not a count: the folder may be deleted, and the run's tag stays in MLflow.
    turn = uuid.uuid4().hex
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, f"{turn}\n")
    return turn


def close_turn(recipe: Recipe) -> None:
    """End the turn of a recipe: the next one has a run of its own."""
    (find_queue_folder(recipe) / TURN).unlink(missing_ok=True)
