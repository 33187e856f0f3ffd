"""Logging of the command line and of tasks: INFO lines on stderr, at the level of ``EBBFLOW_LOG_LEVEL``.

The library itself only logs, to one logger per module. A program that imports it configures logging as it likes, or calls this.
"""

from __future__ import annotations

import logging
import os
import sys

LEVEL = "EBBFLOW_LOG_LEVEL"
PACKAGES = ("ebbflow", "tasks", "workflows")
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Stderr(logging.Handler):
    """Writes to whatever ``sys.stderr`` is at the moment, which test runners and notebooks replace."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def _of_first_rank(record: logging.LogRecord) -> bool:
    """Every process of a training group runs the same code; only the first one reports what is not a warning."""
    return record.levelno >= logging.WARNING or os.environ.get("RANK", "0") == "0"


def configure_logging() -> None:
    """Show the INFO lines of Ebbflow and the warnings of everything else. A root logger with handlers keeps them.

    Raises:
        ValueError: ``EBBFLOW_LOG_LEVEL`` is no log level.
    """
    level = os.environ.get(LEVEL) or "INFO"
    if level.upper() not in logging.getLevelNamesMapping():
        raise ValueError(f"{LEVEL}={level} is no log level; set DEBUG, INFO, WARNING or ERROR")
    if not (root := logging.getLogger()).handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter(FORMAT, "%Y-%m-%d %H:%M:%S"))
        handler.addFilter(_of_first_rank)
        root.addHandler(handler)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level.upper())
