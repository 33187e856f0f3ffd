"""MLflow's tracking URI, which is one for the whole process: a variable of the environment and a
global variable of MLflow.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SETTINGS_MODULE = "mlflow.tracking._tracking_service.utils"


def read_tracking_uri() -> tuple[str | None, str | None]:
    """The environment's tracking URI and that of MLflow's module; ``None`` where it is not set.

    ``mlflow.get_tracking_uri`` does not tell: it answers with a default where nothing is set. Does
    not import MLflow, which takes seconds.
    """
    module = sys.modules.get(SETTINGS_MODULE)
    return (
        os.environ.get("MLFLOW_TRACKING_URI"),
        None if module is None else module._tracking_uri,
    )


@contextmanager
def restored_tracking_uri() -> Iterator[None]:
    """Restores the tracking URI that was set before, also where none was set."""
    import mlflow

    in_environment, in_module = read_tracking_uri()
    try:
        yield
    finally:
        mlflow.set_tracking_uri(in_module)
        if in_environment is None:
            os.environ.pop("MLFLOW_TRACKING_URI", None)
        else:
            os.environ["MLFLOW_TRACKING_URI"] = in_environment
