"""Imports of torch, diffusers and MLflow at less cost: a third of the CPU time of a short command
went into looking for garbage among objects that stay until it ends.
"""

from __future__ import annotations

import atexit
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)
LIBRARIES = "loading torch, diffusers and MLflow, which takes seconds"
REGISTRY = "opening the registry of MLflow"
"""What a command logs before it imports them."""
GARBAGE_THRESHOLD = 10_000
"""New objects after which Python looks for garbage."""


def reduce_garbage_collection() -> None:
    """Look for garbage less often from now on, and not at all as the process ends."""
    # Nearly all objects that torch and diffusers make as they are imported stay: Python's default,
    # to look for garbage after every 700 of them, spends CPU time on nothing.
    gc.set_threshold(GARBAGE_THRESHOLD)
    # As it ends, Python searches everything several times. Frozen objects are not searched. The
    # function runs after the threads have ended and after the functions that libraries registered.
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


@contextmanager
def import_libraries(message: str = LIBRARIES) -> Iterator[None]:
    """Log a message, and look for no garbage while the block imports."""
    logger.info(message)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
