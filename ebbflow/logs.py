"""Logging of the command line and of tasks: INFO lines on stderr, at the level of
``EBBFLOW_LOG_LEVEL``.

The library itself only logs, to one logger per module. A program that imports it configures logging
as it likes, or calls this.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

LEVEL = "EBBFLOW_LOG_LEVEL"
PACKAGES = ("ebbflow", "tasks", "workflows")
WARNINGS = "py.warnings"
"""The logger of Python's warnings, as ``logging.captureWarnings`` calls it."""
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _StderrHandler(logging.Handler):
    """Writes to whatever ``sys.stderr`` is at the moment, which test runners and notebooks
    replace."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            if sys.stderr.isatty():
                # Above the bars of progress, which a plain write would tear apart.
                tqdm.write(line, file=sys.stderr)
            else:
                sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
        # As the handlers of the standard library: a full disk must not end a training.
        except Exception:
            self.handleError(record)


def _is_from_first_rank(record: logging.LogRecord) -> bool:
    """Return whether to show a record: every process of a training group runs the same code, and
    only the first one reports what all of them see.
    """
    # An error, or a warning of a logger, may be of one process alone; Python's warnings are of all.
    of_this_process = record.levelno >= logging.WARNING and record.name != WARNINGS
    return of_this_process or os.environ.get("RANK", "0") == "0"


def _build_once_filter() -> Callable[[logging.LogRecord], bool]:
    """Build a filter that passes each warning once: evaluations, stages and rewards check the same
    things again.
    """
    passed: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        text = record.getMessage()
        known = text in passed
        passed.add(text)
        return not known

    return is_new


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Log a warning in place of ``warnings.showwarning``: ours in a line, a library's with its
    place in the code.
    """
    is_ours = category is UserWarning and any(f"/{package}/" in filename for package in PACKAGES)
    text = str(message) if is_ours else f"{category.__name__}: {message} ({filename}:{lineno})"
    logging.getLogger(WARNINGS).warning("%s", text)


def configure_logging() -> None:
    """Show the INFO lines of Ebbflow and, each once, the warnings of everything. A root logger with
    handlers keeps them.

    Raises:
        ValueError: ``EBBFLOW_LOG_LEVEL`` is no log level.
    """
    level = os.environ.get(LEVEL) or "INFO"
    if level.upper() not in logging.getLevelNamesMapping():
        raise ValueError(f"{LEVEL}={level} is no log level; set DEBUG, INFO, WARNING or ERROR")
    root = logging.getLogger()
    # A program or a test runner that configured logging keeps its own.
    if not root.handlers:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter(FORMAT, "%Y-%m-%d %H:%M:%S"))
        handler.addFilter(_is_from_first_rank)
        handler.addFilter(_build_once_filter())
        root.addHandler(handler)
        warnings.showwarning = _log_warning
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # MLflow has a handler of its own
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level.upper())
