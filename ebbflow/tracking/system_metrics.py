"""CPU, memory, disk, network and GPU of the machine that a node runs on, by MLflow's own
monitor."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING as ENABLED

from ebbflow.data.records import TrackedRun
from ebbflow.recipe.secrets import redact_secrets

logger = logging.getLogger(__name__)


@contextmanager
def log_system_metrics(tracked: TrackedRun, run_id: str | None) -> Iterator[None]:
    """Log the machine's load to a child run while the body runs, every 10 s; a retry goes on with
    the next step.

    ``MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING=false`` switches it off,
    ``MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL`` sets the seconds.

    Args:
        run_id: None if the store is away; then nothing is measured.
    """
    # MLflow's own default is off: only what the user has set counts
    is_enabled = ENABLED.get() if ENABLED.name in os.environ else True
    monitor = _start_monitor(tracked, run_id) if is_enabled and run_id else None
    try:
        yield
    finally:
        if monitor:
            monitor.finish()


# Without a return type: MLflow has no types here.
def _start_monitor(tracked: TrackedRun, run_id: str):  # type: ignore[no-untyped-def]
    """MLflow's monitor, or None where it cannot start: the load of a machine is worth no run."""
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    # below ERROR it reports the start and the end of each node's monitor
    logging.getLogger("mlflow.system_metrics").setLevel(logging.ERROR)
    try:
        # resume_logging: without it a retry counts from step 0 again, and MLflow would show two
        # values at each step
        monitor = SystemMetricsMonitor(
            run_id, resume_logging=True, tracking_uri=tracked.tracking_uri
        )
        monitor.start()
    except Exception as error:
        logger.warning("cannot measure the load of this machine: %s", redact_secrets(str(error)))
        return None
    return monitor
