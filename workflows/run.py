"""Run the pipeline in this process, as ``pyflyte run`` does (``ebbflow run``)."""

from __future__ import annotations

import logging

from flytekit import FlyteContextManager

from ebbflow.recipe import Recipe
from ebbflow.resume import forget_turn, handle_interrupt, remember_turn

# flytekit has replaced the handler of SIGINT when it was imported.
FlyteContextManager.add_signal_handler(handle_interrupt)


def run(recipe: Recipe) -> None:
    """Execute ``post_train`` on this machine. What a person reads of it, tasks have printed.

    Raises:
        Exception: what a task raised, with the names of the task and of its workflows before the
            message.
    """
    # As pyflyte does: errors are raised, too, and would be read twice.
    logging.getLogger("flytekit").setLevel(logging.CRITICAL)
    # Only now: it loads every task, which takes seconds.
    from workflows.post_training import post_train

    post_train(recipe=recipe)


def turn(recipe: Recipe) -> None:
    """Execute ``turn_flywheel`` on this machine. A turn that was stopped is executed to its end.

    Raises:
        Exception: as ``run``.
    """
    logging.getLogger("flytekit").setLevel(logging.CRITICAL)
    from ebbflow.reward_training.queue_folder import close_turn, open_turn
    from workflows.flywheel import turn_flywheel

    remember_turn(open_turn(recipe))
    try:
        turn_flywheel(recipe=recipe)
    finally:
        forget_turn()
    # Only now: a turn that failed goes on in its run.
    close_turn(recipe)
