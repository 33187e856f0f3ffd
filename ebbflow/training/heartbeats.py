"""Heartbeats of the ranks of a group, through the group's store: a rank whose process is stopped,
or whose machine stands still, is named within two minutes. The others only see a collective that
does not end, for as long as its time-out.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ebbflow.alerts import send_alert_in_background

BEAT_SECONDS = 15.0
SILENT_SECONDS = 60.0
"""A rank without a heartbeat for so long is named. Its thread beats also while it computes."""
KEY = "ebbflow/heartbeat"
ENDED = "ended"
"""The last heartbeat of a rank that has nothing more to do: rank 0 may still store the policy."""

logger = logging.getLogger(__name__)


@dataclass
class _LastBeat:
    """The last heartbeat of a rank that this one has seen."""

    value: str
    seen_at: float
    """``time.monotonic()``: the clocks of two machines may differ."""


class Heartbeats:
    """The heartbeats of all ranks, as one of them sees them.

    Args:
        store: the group's, with a connection of its own, as the thread's calls must not wait for
            those of the main thread.
        describe: says what this rank does.
    """

    def __init__(self, store: Any, rank: int, world: int, describe: Callable[[], str]) -> None:
        self.store = store
        self.rank = rank
        self.world = world
        self.describe = describe
        self.num_beats = 0
        self.last: dict[int, _LastBeat] = {}
        self.silent: set[int] = set()
        self.ended: set[int] = set()

    def beat(self) -> None:
        """Tell the others that this process runs, and see who else does."""
        self.num_beats += 1
        process = f"process {os.getpid()} on {os.uname().nodename}"
        self.store.set(f"{KEY}/{self.rank}", f"{self.num_beats}|{process}, {self.describe()}")
        for other in range(self.world):
            key = f"{KEY}/{other}"
            # ``get`` would wait for a rank that has not begun yet.
            if other == self.rank or not self.store.check([key]):
                continue
            value = self.store.get(key).decode()
            self.ended.discard(other)
            if value == ENDED:
                self.ended.add(other)
                self.last.pop(other, None)
            elif other not in self.last or self.last[other].value != value:
                self.last[other] = _LastBeat(value, time.monotonic())
        self._report_silent()

    def end(self) -> None:
        """Tell the others that no further heartbeat comes."""
        self.store.set(f"{KEY}/{self.rank}", ENDED)

    def _report_silent(self) -> None:
        silent = {
            other
            for other, beat in self.last.items()
            if time.monotonic() - beat.seen_at > SILENT_SECONDS
        }
        # One rank speaks for all: the first that still runs.
        if silent | self.ended >= set(range(self.rank)):
            for other in sorted(silent - self.silent):
                _, _, what = self.last[other].value.partition("|")
                text = (
                    f"rank {other} of {self.world} gives no sign of life for"
                    f" {time.monotonic() - self.last[other].seen_at:.0f} s ({what}): its process is"
                    " stopped, or its machine stands still; the other ranks wait for it"
                )
                logger.warning("%s", text)
                send_alert_in_background(text)
            for other in sorted(self.silent - silent):
                logger.info("rank %d runs again", other)
        self.silent = silent


@contextmanager
def exchange_heartbeats(
    store: Any, rank: int, world: int, describe: Callable[[], str]
) -> Iterator[None]:
    """Exchange heartbeats with the other ranks while the block runs."""
    ended = threading.Event()
    heartbeats = Heartbeats(store.clone(), rank, world, describe)
    answered_at = time.monotonic()

    def beat_until_ended() -> None:
        nonlocal answered_at
        try:
            while not ended.wait(BEAT_SECONDS):
                heartbeats.beat()
                answered_at = time.monotonic()
            heartbeats.end()
        except RuntimeError as error:
            # The store went with the machine that holds it, which ends the training, too.
            logger.debug("no more heartbeats: %s", error)

    def watch_store() -> None:
        # A thread of its own: calls of a store whose process is stopped wait without a time-out.
        while not ended.wait(BEAT_SECONDS):
            seconds = time.monotonic() - answered_at
            if thread.is_alive() and seconds > SILENT_SECONDS:
                _report_silent_store(rank, seconds)
                return

    thread = threading.Thread(target=beat_until_ended, name="heartbeat", daemon=True)
    watcher = threading.Thread(target=watch_store, name="store", daemon=True)
    thread.start()
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(BEAT_SECONDS)
        watcher.join(BEAT_SECONDS)


def _report_silent_store(rank: int, seconds: float) -> None:
    """Say that the process or the machine that holds the group's store stands still."""
    host = os.environ.get("MASTER_ADDR", "the first rank's machine")
    text = (
        f"the store of the training group on {host} gives no sign of life for {seconds:.0f} s (seen"
        f" by rank {rank} on {os.uname().nodename}): its process is stopped, or its machine stands"
        " still; the ranks wait for it"
    )
    logger.warning("%s", text)
    # The ranks cannot agree on who speaks: the first of each machine does.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        send_alert_in_background(text)
