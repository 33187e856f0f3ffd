"""Typed Flyte tasks, one per file: fetch the inputs, call the library, return the outputs.

Where it fits
    Between ``workflows``, which orders the tasks, and the library, which knows no Flyte.

Why
    What Flyte asks for (types, caches, pods, retries, files behind URIs) stays out of the code that
    trains, so the library runs and is tested without an orchestrator.

How
    - One task per file. Its body fetches inputs (``files``), opens the node's MLflow run and calls
      one library function.
    - ``resources`` turns the deployment (``deployment``, one YAML file) into pods; ``images`` is
      the CPU image.
    - ``transformers`` makes Flyte's types of Pydantic models, small enough for its engine.
    - ``descriptions`` is what Flyte's console says of workflows, tasks and inputs.
    - ``sources`` says what is registered; every pod refuses to run other code than that.
    - ``error_text`` puts the message of an error before its trace, for Flyte's console.
    - ``cache`` says what is reused: within a run, or by all runs. ``preemption`` turns a SIGTERM
      into a retry; ``elastic`` is the training group of offline stages.
    - Importing this package configures logging (``EBBFLOW_LOG_LEVEL``) and the object store for
      every process that runs a task.

Gotchas
    - Task names are import paths: renaming a module loses its history and caches.
    - Heavy imports belong in the bodies, or registering needs the GPU stack.
    - A plain exception is never retried; raise ``FlyteRecoverableException``, see
      ``preemption.retry_on``.
    - Every rank runs the body of ``train_offline``; only what rank 0 returns counts.
"""

from __future__ import annotations

import logging

import fsspec
from flytekit.configuration import DataConfig
from flytekit.core.data_persistence import s3_setup_args

from ebbflow.logs import configure_logging
from ebbflow.metrics_server import serve_metrics
from ebbflow.storage.sources import check_sources
from ebbflow.watchdog import enable_stack_dumps
from tasks.descriptions import describe_entities
from tasks.error_text import put_messages_first
from tasks.local_cache import forget_damaged_outputs
from tasks.preemption import end_at_sigterm
from tasks.transformers import register_transformers

configure_logging()
enable_stack_dumps()
serve_metrics()
forget_damaged_outputs()
# The library opens URIs with fsspec and knows no Flyte: point it to the store that Flyte is
# configured for.
fsspec.config.conf.setdefault("s3", {}).update(s3_setup_args(DataConfig.auto().s3))


def _is_actionable(record: logging.LogRecord) -> bool:
    """Return whether a reader of flytekit's log can do anything about a record."""
    message = record.getMessage()
    # ``options``, the keys of a user's own code, have no type, but travel inside the recipe as
    # MessagePack: nothing is pickled.
    if message.startswith("Unsupported Type typing.Any"):
        return False
    # How a node of several ends that is not the first: nothing went wrong, and ``elastic`` says so.
    if message.startswith("User-scoped IgnoreOutputs received"):
        return False
    # Flytekit never closes its session with the object store, which ends with the process.
    return "'message': 'Unclosed client session'" not in message


logging.getLogger("flytekit").addFilter(_is_actionable)
register_transformers()
put_messages_first()
# After the line above, which puts an error of this check first in Flyte's console.
check_sources()
describe_entities()
end_at_sigterm()
