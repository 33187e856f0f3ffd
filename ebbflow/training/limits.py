"""What ends a stage before its last step: its machine is taken away, or its budget is spent.

A stage asks after every step. When the machine goes (SIGTERM, or the time in ``EBBFLOW_EXPIRES_AT`` comes near), it saves where
it stands and raises ``Preempted``: another attempt goes on from there. When the budget of the recipe is spent, it ends with what
was learnt so far.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from enum import IntEnum
from types import FrameType

from ebbflow.recipe.stages import StageConfig
from ebbflow.training.distributed import all_reduce_max
from ebbflow.training.update import TrainingError

EXPIRES = "EBBFLOW_EXPIRES_AT"
TO_SAVE = 60.0
"""Seconds that are left for saving at least, where a machine expires."""


_TOLD = threading.Event()
"""A SIGTERM came; signals belong to the process."""


class Preempted(RuntimeError):
    """The stage was stopped and saved: names the reason, the step and the way on."""


class Stop(IntEnum):
    """Whether to go on; the larger goes before, where processes disagree."""

    NO = 0
    SPENT = 1
    """The budget is: the stage is over."""
    LEAVE = 2
    """The machine: save, and go on elsewhere."""


class StopConditions:
    """The clock of an attempt at a stage. No step is begun that would end too late, if it took as long as the longest so far.

    An attempt makes at least one step.

    Args:
        gpus: of the whole stage, whose hours ``max_gpu_hours`` counts.
        spent: seconds of earlier attempts, as far as they were saved.
        lead: steps that are under way while another one trains; those who leave wait for them, as they are saved too.

    Raises:
        TrainingError: ``EBBFLOW_EXPIRES_AT`` is no time with a zone, or is past; GPU hours are to be counted without a GPU.
    """

    def __init__(self, config: StageConfig, gpus: float, spent: float = 0.0, lead: int = 0) -> None:
        self.config, self.gpus, self.spent, self.lead = config, gpus, spent, lead
        self.expires = _expiry(os.environ.get(EXPIRES))
        self.reason = "another process was told to end"
        self.begun = self.stepped = time.monotonic()
        self.longest = 0.0
        if config.max_gpu_hours and not gpus:
            raise TrainingError(f"max_gpu_hours = {config.max_gpu_hours:g} and the stage has no GPU; use max_hours")

    @property
    def elapsed(self) -> float:
        """Seconds of this attempt and of those before it."""
        return self.spent + time.monotonic() - self.begun

    def after_step(self) -> Stop:
        """Whether the stage goes on after this step; all processes of a group ask together, and get the same answer."""
        now = time.monotonic()
        self.longest, self.stepped = max(self.longest, now - self.stepped), now
        return Stop(all_reduce_max(self._own()))

    def preemption_message(self, stage: str, step: int, steps: int, saved: bool) -> str:
        """What to say when the machine is left."""
        way_on = (
            "they are saved: start it again, and it goes on from there"
            if saved
            else "they are lost: no checkpoints were asked for"
        )
        return f"{stage} was told to end ({self.reason}) and has done {step} of {steps} steps; {way_on}"

    def budget_message(self, step: int, steps: int) -> str:
        """What to say of a stage whose budget is spent."""
        return f"ended after {step} of {steps} steps: {self.reason}"

    def _own(self) -> Stop:
        if _TOLD.is_set():
            self.reason = "SIGTERM"
            return Stop.LEAVE
        if self.expires and time.time() + max(TO_SAVE, (2 + self.lead) * self.longest) > self.expires:
            self.reason = f"{EXPIRES} = {os.environ[EXPIRES]}"
            return Stop.LEAVE
        hours = (self.elapsed + self.longest) / 3600
        for key, used in (("max_hours", hours), ("max_gpu_hours", hours * self.gpus)):
            if (most := getattr(self.config, key)) is not None and used > most:
                self.reason = f"{key} = {most:g}"
                return Stop.SPENT
        return Stop.NO


@contextmanager
def handle_sigterm() -> Iterator[None]:
    """Take a SIGTERM as a word to end after the step, once; a second one does what it did before.

    A stage listens from before it loads its models. One that ends by itself before it can obey leaves the word to the next stage
    of this process, of whatever run. Only the main thread hears signals; a block inside another does nothing.
    """
    heard_already = getattr(signal.getsignal(signal.SIGTERM), "is_heard", False)
    if heard_already or threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(number: int, frame: FrameType | None) -> None:
        _TOLD.set()
        signal.signal(signal.SIGTERM, before)

    hear.is_heard = True  # type: ignore[attr-defined]
    before = signal.signal(signal.SIGTERM, hear)
    try:
        yield
    except BaseException:
        _TOLD.clear()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _expiry(text: str | None) -> float | None:
    """Seconds since 1970."""
    if not text:
        return None
    try:
        expires = datetime.fromisoformat(text)
    except ValueError:
        expires = datetime.min
    if expires.tzinfo is None:
        raise TrainingError(f"{EXPIRES} = {text!r} is no time with a zone; write it like 2026-01-31T18:00:00+00:00")
    if expires.timestamp() < time.time():
        raise TrainingError(f"{EXPIRES} = {text} is past: this machine is no longer ours; set it anew, or leave it out")
    return expires.timestamp()
