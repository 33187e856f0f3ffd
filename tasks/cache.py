"""What is not computed twice."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from flytekit import Cache, FlyteContextManager, map_task

import ebbflow
from ebbflow.storage.identity import code_digest

ONCE_PER_RUN = Cache(version="1")
"""For tasks that get the run as an input: a local run that died and is started again goes on behind the last finished one.

The version says nothing about the code, because a run only goes on with the code that began it (tasks/start_run.py).
"""


def once_for_all_runs(*sources: str) -> Cache:
    """For what the other inputs decide, and these sources of the library if any; the run is only where it is tracked."""
    library = Path(ebbflow.__file__).parent
    version = code_digest(*(library / source for source in sources))[:16] if sources else "1"
    return Cache(version=version, serialize=True, ignored_inputs=("run",))


def mapped(bound: partial[Any], **values: Any) -> Any:
    """A task, bound to its other inputs, over the values of one input: a map task, or in a local execution one call each.

    Flyte caches those calls, while a map task that dies on one machine would begin with its first value again.
    """
    execution = FlyteContextManager.current_context().execution_state
    if execution is None or not execution.is_local_execution():
        return map_task(bound)(**values)
    ((name, several),) = values.items()
    return [bound(**{name: value}) for value in several]
