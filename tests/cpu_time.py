"""A bound on computing: what takes quadratic time on a large input would take hours, and fails here
within a minute.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def at_most_cpu_seconds(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"more than {seconds:g} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
