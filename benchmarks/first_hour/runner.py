"""Runs the parts, each in a process of its own that ends with its time limit."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.first_hour.lines import Line, Setting, append_line, read_lines
from benchmarks.first_hour.parts import PARTS, Part

LEAST_SECONDS = 20
"""A part that has less than this left is not started."""
ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "benchmarks.first_hour")
"""What measures one part, with ``--measure``."""


@dataclass(frozen=True)
class Outcome:
    """How a part ended.

    Attributes:
        ending: "finished", or what ended it: "exit 1", "signal 9", "after 180 s", "no time left".
        commit: of the code that it measured.
    """

    part: Part
    ending: str
    seconds: float
    commit: str
    lines: tuple[Line, ...]

    @property
    def all_lines(self) -> tuple[Line, ...]:
        """Its lines, and one for each claim that it left open."""
        answered = {line.claim for line in self.lines}
        missing = [claim for claim in self.part.claims if claim not in answered]
        if self.ending == "no time left":
            note = "no time was left; start it again in the same folder, with more --minutes"
            return self.lines + tuple(Line(c, "not measured", note=note) for c in missing)
        note = f"the part ended early ({self.ending}); see {self.part.name}.out"
        return self.lines + tuple(Line(claim, "failed", note=note) for claim in missing)


def run_parts(
    setting: Setting, minutes: float, commit: str, names: Collection[str] = ()
) -> Iterator[Outcome]:
    """Run the parts in their order and yield how each ended; those that an earlier start finished
    on the same commit are kept.

    Args:
        minutes: for all of them together.
        names: of the parts to run again; the others are kept, whatever they measured.
    """
    setting.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * minutes
    for number, part in enumerate(PARTS, 1):
        kept = read_outcome(setting, part)
        is_wanted = part.name in names if names else kept is None or kept.commit != commit
        title = f"{number}/{len(PARTS)} {part.name}"
        if not is_wanted:
            if kept is not None:
                print_progress(f"{title}: kept from an earlier start")
                yield kept
            continue
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            print_progress(f"{title}: no time left")
            yield Outcome(part, "no time left", 0.0, commit, ())
            continue
        limit = min(60 * part.minutes, left)
        print_progress(f"{title}: at most {limit:.0f} s of the {left / 60:.0f} minutes left")
        yield run_part(setting, part, limit, commit)


def run_part(setting: Setting, part: Part, limit: float, commit: str) -> Outcome:
    """Run one part in a process of its own for at most ``limit`` seconds."""
    lines = setting.folder / f"{part.name}.jsonl"
    lines.unlink(missing_ok=True)
    path_of_outcome(setting, part).unlink(missing_ok=True)
    command = [*COMMAND, "--measure", part.name, "--folder", str(setting.folder)]
    command += ["--size", setting.size]
    start = time.monotonic()
    with (setting.folder / f"{part.name}.out").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            ending = f"after {limit:.0f} s"
        else:
            ending = "finished"
            if code:
                ending = f"exit {code}" if code > 0 else f"signal {-code}"
        finally:
            # Also what it started, and after Ctrl-C: nothing may hold the GPU after this.
            end_group(process)
    seconds = time.monotonic() - start
    outcome = Outcome(part, ending, seconds, commit, tuple(read_lines(lines)))
    if ending == "finished":
        record = {"seconds": seconds, "commit": commit}
        path_of_outcome(setting, part).write_text(json.dumps(record))
    return outcome


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a part's process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def path_of_outcome(setting: Setting, part: Part) -> Path:
    return setting.folder / f"{part.name}.done"


def read_outcome(setting: Setting, part: Part) -> Outcome | None:
    """Read how a part ended in an earlier start; None where it did not finish."""
    path = path_of_outcome(setting, part)
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    lines = tuple(read_lines(setting.folder / f"{part.name}.jsonl"))
    return Outcome(part, "finished", record["seconds"], record["commit"], lines)


def measure_part(setting: Setting, name: str) -> None:
    """Measure a part in this process, and write each line as soon as it is known."""
    (part,) = (part for part in PARTS if part.name == name)
    setting.folder.mkdir(parents=True, exist_ok=True)
    module = importlib.import_module(f"benchmarks.first_hour.parts.{part.module}")
    arguments = {"setting": setting}
    # Modules of several parts are told which one they measure.
    if "name" in inspect.signature(module.measure).parameters:
        arguments["name"] = name
    for line in module.measure(**arguments):
        if line.claim not in part.claims:
            raise ValueError(f"{line.claim!r} is no claim of the part {name}; add it to PARTS")
        print_progress(f"{line.verdict}: {line.claim} {line.number}")
        append_line(setting.folder / f"{name}.jsonl", line)


def print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
