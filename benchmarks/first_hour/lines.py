"""The lines that parts write: a claim, a verdict, and the number that it rests on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["passed", "failed", "not measured"]


@dataclass(frozen=True)
class Line:
    """The answer to one claim.

    Example:
        ``Line("adapters, equal rows: the first log-ratio is 0", "passed", "0", "exactly 0")``

    Attributes:
        claim: one of the claims of its part.
        number: what was measured, with its unit.
        bar: what the number has to be for "passed"; empty where it is information alone.
        note: why it failed or was not measured.
    """

    claim: str
    verdict: Verdict
    number: str = ""
    bar: str = ""
    note: str = ""


@dataclass(frozen=True)
class Setting:
    """What a part works with.

    Attributes:
        folder: where the parts keep models, runs and results.
        size: of the networks, a key of ``benchmarks.gpu_sides.SIZES``.
    """

    folder: Path
    size: str


def judge(claim: str, holds: bool, number: str, bar: str, note: str = "") -> Line:
    """Return the line of a claim that was measured; ``note`` is kept where it does not hold."""
    if holds:
        return Line(claim, "passed", number, bar)
    return Line(claim, "failed", number, bar, note)


def skip(claim: str, note: str, number: str = "") -> Line:
    """Return the line of a claim that this machine cannot show."""
    return Line(claim, "not measured", number, note=note)


def append_line(path: Path, line: Line) -> None:
    """Append a line to a part's file, on the disk before this returns: the next may crash."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(line)) + "\n")


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a part's file; none where it has not begun."""
    if path.exists():
        for text in path.read_text().splitlines():
            yield Line(**json.loads(text))
