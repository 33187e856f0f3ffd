"""Preemption: errors after which Flyte retries a task, and the end of a pod that is told to go."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flytekit.exceptions.user import FlyteRecoverableException


@contextmanager
def retry_on_errors(*errors: type[Exception]) -> Iterator[None]:
    """Turn these errors into Flyte's recoverable one, the only error after which it retries a
    task.
    """
    try:
        yield
    except errors as error:
        # Not ``from error``: Flyte's exceptions print their cause, at every level of the workflow
        # once more. The traceback still leads to where it was raised.
        recoverable = FlyteRecoverableException(str(error))
        raise recoverable.with_traceback(error.__traceback__) from None


LOST_MACHINE = 128 + signal.SIGKILL
"""Exit code that Flyte takes for a lost machine: retries of the platform, not of the task."""


def end_at_sigterm() -> None:
    """Let SIGTERM end this process at once, if it is the first of a container.

    The kernel ignores the signal there unless a process has a handler. A pod that is aborted or
    preempted would hold its machine for all of its grace period, 300 seconds with the defaults, and
    end by SIGKILL. Stages have handlers of their own while they train, and save.
    """
    is_first_process = os.getpid() == 1
    is_main_thread = threading.current_thread() is threading.main_thread()
    if is_first_process and is_main_thread and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(LOST_MACHINE))
