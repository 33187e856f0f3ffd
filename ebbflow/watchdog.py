"""What a process does, for the person who asks why nothing happens: lines that name what takes
long, and the stacks of all threads when it takes too long or on SIGUSR1.

Work that may hang names itself with ``watch``. A thread of its own looks at the names, so it also
speaks while the main thread is inside a reward or a kernel.
"""

from __future__ import annotations

import faulthandler
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebbflow.alerts import send_alert_in_background
from ebbflow.formatting import format_duration
from ebbflow.storage.disk import create_private_folder

SAY_AFTER_SECONDS = 60.0
"""Work that takes longer is named in a line, and again each time it has taken twice as long."""
STALL = "EBBFLOW_STALL_MINUTES"
STALL_MINUTES = 10.0
"""Default of ``STALL``: work that takes longer is an alarm, with the stacks of all threads."""

logger = logging.getLogger(__name__)


@dataclass
class _Activity:
    """Something that the process does now."""

    name: str
    since: float = field(default_factory=time.monotonic)
    say_after: float = SAY_AFTER_SECONDS
    has_stalled: bool = False


class Watchdog:
    """Looks at the activities of a process.

    Args:
        stall_seconds: after which an activity is an alarm.
    """

    def __init__(self, stall_seconds: float) -> None:
        self.stall_seconds = stall_seconds
        self.activities: dict[int, _Activity] = {}
        self.numbers = itertools.count()
        self.thread: threading.Thread | None = None
        self.process = 0

    def add(self, name: str) -> int:
        """Add an activity; return its number."""
        number = next(self.numbers)
        # A fork has the object and not the thread, and does nothing of what its parent did.
        if self.process != os.getpid():
            self.process = os.getpid()
            self.activities.clear()
            self.thread = threading.Thread(target=self._look_forever, name="watchdog", daemon=True)
            self.thread.start()
        self.activities[number] = _Activity(name, say_after=SAY_AFTER_SECONDS)
        return number

    def look(self) -> None:
        """Say which activities take long."""
        for activity in list(self.activities.values()):
            seconds = time.monotonic() - activity.since
            if seconds >= self.stall_seconds and not activity.has_stalled:
                activity.has_stalled = True
                self._report_stall(activity, seconds)
            elif seconds >= activity.say_after:
                activity.say_after *= 2
                logger.info("%s has taken %s so far", activity.name, format_duration(seconds))

    def _look_forever(self) -> None:
        while True:
            # The intervals of a test, or of a short limit, are shorter than those of a night.
            time.sleep(min(SAY_AFTER_SECONDS, self.stall_seconds) / 4)
            self.look()

    def _report_stall(self, activity: _Activity, seconds: float) -> None:
        try:
            where = f"the stacks of all threads are in {_write_stacks(activity.name)}"
        except (OSError, ValueError) as error:
            # A full disk, or a folder of another user: the alarm still rings, and the next one.
            where = f"the stacks of its threads cannot be written: {error}"
        text = f"{activity.name} has taken {format_duration(seconds)} ({STALL})"
        logger.warning("%s; %s", text, where)
        send_alert_in_background(f"{text}, process {os.getpid()} on {os.uname().nodename}")


def _write_stacks(name: str) -> Path:
    file = path_of_stacks()
    with file.open("a") as stacks:
        stacks.write(f"{time.ctime()}: {name}\n")
        # faulthandler writes to the descriptor, past the file's buffer.
        stacks.flush()
        faulthandler.dump_traceback(stacks, all_threads=True)
    return file


def _read_stall_seconds() -> float:
    """Read the limit of the environment.

    Raises:
        ValueError: it is no positive number.
    """
    text = os.environ.get(STALL) or str(STALL_MINUTES)
    with suppress(ValueError):
        minutes = float(text)
        if minutes > 0:
            return minutes * 60
    raise ValueError(f"{STALL}={text} is no number of minutes above 0; set such as 10")


_watchdog = Watchdog(STALL_MINUTES * 60)


def enable_stack_dumps() -> None:
    """Let SIGUSR1 write the stacks of all threads to stderr, and read the limit of a stall.

    Raises:
        ValueError: ``EBBFLOW_STALL_MINUTES`` is no positive number.
    """
    _watchdog.stall_seconds = _read_stall_seconds()
    # Not ``sys.stderr``, which test runners replace by an object that is no file. None: there is no
    # terminal, nor a file, to write to.
    if sys.__stderr__ is not None:
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)


@contextmanager
def watch(name: str) -> Iterator[None]:
    """Name what the block does, such as "the reward 'mine' scoring 8 images", while it does it."""
    number = _watchdog.add(name)
    try:
        yield
    finally:
        # Not there where the process has forked inside the block.
        _watchdog.activities.pop(number, None)


def describe_activities() -> list[str]:
    """Describe what this process does now, the oldest first.

    Example:
        ``["rollout worker 0: generating request 2 of step 5 for 1:05"]``
    """
    activities = sorted(_watchdog.activities.values(), key=lambda activity: activity.since)
    return [
        f"{activity.name} for {format_duration(time.monotonic() - activity.since)}"
        for activity in activities
    ]


def list_activities() -> list[dict[str, Any]]:
    """List what this process does now as plain data: name, seconds, and whether it has stalled."""
    return [
        {
            "name": activity.name,
            "seconds": time.monotonic() - activity.since,
            "stalled": activity.has_stalled,
        }
        for activity in list(_watchdog.activities.values())
    ]


def path_of_stacks() -> Path:
    """Return the file that the stacks of this process are appended to."""
    return create_private_folder() / f"stacks-{os.getpid()}.txt"
