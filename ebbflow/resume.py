"""What a person is told when a local run ends early: what is kept, and how to resume."""

from __future__ import annotations

import atexit
import os
import shlex
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NoReturn


class InterruptedAttempt(RuntimeError):
    """An attempt was ended from outside, by a signal or by the loss of a machine; another attempt
    goes on where it stopped.
    """


SIGTERM_CAME = threading.Event()
"""A SIGTERM came while a stage had its handler. Signals belong to the process, so this is no
attribute of a stage.
"""


def take_sigterm() -> bool:
    """Return whether a SIGTERM came that no stage has obeyed, and forget it: for what follows a
    stage in the same process, whose signals no other process has.
    """
    is_pending = SIGTERM_CAME.is_set()
    SIGTERM_CAME.clear()
    return is_pending


_opened: list[str] = []
"""The folder of the run that this process executes, once it is open."""


def remember_run_folder(folder: str) -> None:
    """From now on ``folder`` keeps what this process finishes."""
    _opened[:] = [folder]


_turn: list[str] = []
"""The turn of the flywheel that this process executes, once it is open."""


def remember_turn(turn: str) -> None:
    """From now on this process executes ``turn``, whose run is tagged with it."""
    _turn[:] = [turn]


def find_turn() -> str | None:
    """Return the turn of the flywheel that this process executes; None in any other run."""
    return _turn[0] if _turn else None


def forget_turn() -> None:
    """The turn has ended: further runs of this process are no part of it."""
    _turn.clear()


def how_to_resume() -> str:
    """What is kept where, and the command that resumes."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return (
        f"{_opened[0]} keeps what is finished; resume with: {command}"
        if _opened
        else f"start again with: {command}"
    )


def handle_interrupt(number: int, frame: FrameType | None = None) -> NoReturn:
    """A handler of SIGINT (Ctrl-C): a line at once, one when everything has ended, and exit status
    130. Another SIGINT kills.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    when = "interrupted" if _opened else "interrupted before the run was opened"
    # Not ``print``: the signal may arrive in the middle of another print.
    os.write(sys.stderr.fileno(), f"\n{when}\n".encode())
    # Said last, after what progress bars and training processes still say.
    atexit.register(_write_line, how_to_resume())
    sys.exit(128 + number)


def _write_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")
