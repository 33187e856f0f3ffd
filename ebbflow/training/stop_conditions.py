"""What ends a stage before its last step: its machine is taken away, or its budget is spent.

A stage asks after every step. When the machine goes (SIGTERM, or the time in ``EBBFLOW_EXPIRES_AT``
comes near), the stage saves a checkpoint and raises ``Preempted``: another attempt resumes from it.
When the budget of the recipe is spent, the stage ends with what it learnt so far.
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
from ebbflow.resume import SIGTERM_CAME, InterruptedAttempt
from ebbflow.training.distributed import JointExit, all_reduce_max
from ebbflow.training.passes import TrainingError

EXPIRES = "EBBFLOW_EXPIRES_AT"
MIN_SECONDS_TO_SAVE = 60.0
"""Time that is left for saving at least, where a machine expires."""


class Preempted(JointExit, InterruptedAttempt):
    """The stage stopped because its machine is taken away: names the reason, the step, and how to
    resume.
    """


class Stop(IntEnum):
    """Whether a stage stops after a step. Where processes disagree, the larger value holds for
    all."""

    NO = 0
    SPENT = 1
    """The budget is spent: the stage is over."""
    LEAVE = 2
    """The machine is taken away: save, and resume elsewhere."""


class StopConditions:
    """The clock of an attempt at a stage. No step starts that would end too late, if it took as
    long as the longest so far.

    An attempt makes at least one step.

    Args:
        gpus: of the whole stage, for ``max_gpu_hours``.
        seconds_before: of earlier attempts, as far as they were saved.
        steps_ahead: steps in flight while another one trains; a stage that leaves waits for them,
            as they are saved too.

    Raises:
        TrainingError: ``EBBFLOW_EXPIRES_AT`` is no time with a zone, or is past; ``max_gpu_hours``
            without a GPU.
    """

    def __init__(
        self, config: StageConfig, gpus: float, seconds_before: float = 0.0, steps_ahead: int = 0
    ) -> None:
        self.config = config
        self.gpus = gpus
        self.seconds_before = seconds_before
        self.steps_ahead = steps_ahead
        expires = os.environ.get(EXPIRES)
        self.expires = _parse_expiry(expires) if expires else None  # seconds since 1970
        self.reason = "another process was preempted"
        self.started = time.monotonic()
        self.last_step_at = self.started
        self.max_step_seconds = 0.0
        if config.max_gpu_hours and not gpus:
            raise TrainingError(
                f"max_gpu_hours = {config.max_gpu_hours:g} and the stage has no GPU; use max_hours"
            )

    @property
    def elapsed_seconds(self) -> float:
        """Seconds of this attempt and of those before it."""
        return self.seconds_before + time.monotonic() - self.started

    def check_after_step(self) -> Stop:
        """Return whether the stage stops after this step. All processes of a group ask together,
        and get the same answer.
        """
        now = time.monotonic()
        self.max_step_seconds = max(self.max_step_seconds, now - self.last_step_at)
        self.last_step_at = now
        # Clocks differ, and a signal may reach one process alone: the largest reason counts
        # for all, or some would wait in the next step for those that left.
        return Stop(all_reduce_max(self._check_this_process()))

    def preemption_message(self, stage: str, step: int, num_steps: int, saved: bool) -> str:
        """Build the message of a stage that leaves its machine."""
        fix = (
            "a checkpoint is saved: start it again to resume"
            if saved
            else "nothing is saved: the recipe asks for no checkpoints"
        )
        return f"{stage} was preempted ({self.reason}) after {step} of {num_steps} steps; {fix}"

    def budget_message(self, step: int, num_steps: int) -> str:
        """Build the message of a stage whose budget is spent."""
        return f"ended after {step} of {num_steps} steps: {self.reason}"

    def _check_this_process(self) -> Stop:
        if SIGTERM_CAME.is_set():
            self.reason = "SIGTERM"
            return Stop.LEAVE
        # Time for the next step, for those in flight, and as long as a step for saving.
        seconds_needed = (2 + self.steps_ahead) * self.max_step_seconds
        seconds_needed = max(MIN_SECONDS_TO_SAVE, seconds_needed)
        if self.expires and time.time() + seconds_needed > self.expires:
            self.reason = f"{EXPIRES} = {os.environ[EXPIRES]}"
            return Stop.LEAVE
        # What the next step would use: one that ends above the budget is not started.
        hours = (self.elapsed_seconds + self.max_step_seconds) / 3600
        for key, used in (("max_hours", hours), ("max_gpu_hours", hours * self.gpus)):
            limit = getattr(self.config, key)
            if limit is not None and used > limit:
                self.reason = f"{key} = {limit:g}"
                return Stop.SPENT
        return Stop.NO


@contextmanager
def handle_sigterm() -> Iterator[None]:
    """Take one SIGTERM as a request to stop after the step; a second one does what it did before
    the block.

    A stage enters the block before it loads its models. A stage that ends by itself before it can
    obey leaves the request to the next node of this process (``take_sigterm``), of whatever run.
    Signals arrive in the main thread only; a block inside another does nothing.
    """
    handled_already = getattr(signal.getsignal(signal.SIGTERM), "is_stage_handler", False)
    if handled_already or threading.current_thread() is not threading.main_thread():
        yield
        return

    def set_sigterm_event(number: int, frame: FrameType | None) -> None:
        SIGTERM_CAME.set()
        signal.signal(signal.SIGTERM, previous_handler)

    # A block inside this one sees the mark and does nothing, so that the second SIGTERM does what
    # it did before the outer block.
    set_sigterm_event.is_stage_handler = True  # type: ignore[attr-defined]
    previous_handler = signal.signal(signal.SIGTERM, set_sigterm_event)
    try:
        yield
    except BaseException:
        # The stage obeyed (``Preempted``) or failed: the request is over with it.
        SIGTERM_CAME.clear()
        raise
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _parse_expiry(text: str) -> float:
    """Parse a time with a zone into seconds since 1970."""
    try:
        expires = datetime.fromisoformat(text)
    except ValueError:
        expires = datetime.min  # which has no zone either
    if expires.tzinfo is None:
        raise TrainingError(
            f"{EXPIRES} = {text!r} is no time with a zone; write it like 2026-01-31T18:00:00+00:00"
        )
    if expires.timestamp() < time.time():
        raise TrainingError(
            f"{EXPIRES} = {text} is past: this machine is no longer ours; set it anew, or leave"
            " it out"
        )
    return expires.timestamp()
