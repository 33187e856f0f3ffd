"""Progress of long work: a bar on a terminal; elsewhere, as in the logs of pods, a log line every
so often.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

INTERVAL = 30.0
"""Seconds between two lines. Work that takes less has none."""
LINE = "{desc}: {n_fmt} of {total_fmt} UNITS, {elapsed} so far, {remaining} left{postfix}"

logger = logging.getLogger(__name__)
# tqdm's own lock also covers other processes, and making it starts one (multiprocessing's tracker).
tqdm.set_lock(threading.RLock())


def show_progress(
    title: str,
    unit: str,
    work: Iterable[Any] | None = None,
    total: int | None = None,
    done: int = 0,
    quiet: bool = False,
) -> tqdm[Any]:
    """Show how far ``work`` is, as it is iterated over, or as ``update`` and ``set_postfix`` of the
    result are called.

    Args:
        title: what is under way, such as ``1.1 online rollout``.
        unit: of what is counted, in the singular.
        total: of the units; left out, ``len(work)``.
        done: units that an earlier attempt did.
        quiet: show nothing.
    """
    common: dict[str, Any] = {
        "iterable": work,
        "total": total,
        "initial": done,
        "desc": title,
        "unit": unit,
        "disable": quiet,
    }
    # A bar is redrawn in place, which in a file would be a line each time.
    if sys.stderr.isatty():
        return tqdm(**common)
    # "miniters" 1 with a fixed interval: tqdm else skips updates by a guess of its own.
    lines: dict[str, Any] = {
        "delay": INTERVAL,
        "mininterval": INTERVAL,
        "maxinterval": INTERVAL,
        "miniters": 1,
    }
    units = f"{unit}es" if unit.endswith("ch") else f"{unit}s"
    return tqdm(**common, **lines, file=_LogLines(), bar_format=LINE.replace("UNITS", units))


class _LogLines:
    """The file to which tqdm writes its lines; the last one twice, where it is due as the work
    ends.
    """

    last = ""

    def write(self, text: str) -> None:
        # tqdm writes blanks to clear a bar, and a carriage return before each line.
        line = text.strip()
        if line not in ("", self.last):
            logger.info("%s", line)
            self.last = line

    def flush(self) -> None:
        pass
