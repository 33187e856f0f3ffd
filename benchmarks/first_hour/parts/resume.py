"""A run that is killed in its online stage and started again, against the part tiny."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.first_hour.lines import Line, Setting, judge, skip
from benchmarks.first_hour.parts.whole_runs import start_run, write_recipe

CLAIM = "a run that was killed in its online stage ends with the bytes of one that was not"
CHECKPOINT = "checkpoint of step 1 saved"
"""In the log, in the middle of the online stage."""


def measure(setting: Setting) -> Iterator[Line]:
    expected = digest_policies(setting.folder / "runs")
    if not expected:
        yield skip(CLAIM, "the part tiny has no run to compare with")
        return
    recipe = write_recipe(setting, "tiny", "killed_runs")
    log = setting.folder / "resume.log"
    with log.open("w") as file:
        process = start_run(recipe, file)
        killed = kill_after(process, log, CHECKPOINT)
        code = start_run(recipe, file).wait()
    found = digest_policies(setting.folder / "killed_runs")
    different = [name for name, digest in expected.items() if found.get(name) != digest]
    yield judge(
        CLAIM,
        killed and code == 0 and not different,
        f"exit {code}, {len(expected) - len(different)} of {len(expected)} files equal",
        "killed, exit 0, all equal",
        f"killed: {killed}; different: {', '.join(different)}",
    )


def kill_after(process: subprocess.Popen[str], log: Path, text: str) -> bool:
    """Kill a run and its processes once its log has a text; return whether it was still there."""
    while process.poll() is None:
        if text in log.read_text():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.05)
    return False


def digest_policies(output: Path) -> dict[str, str]:
    """Digest the weights of the policies of a folder's only run, by their path in the run."""
    return {
        str(file.relative_to(file.parents[len(file.relative_to(output).parts) - 2])): (
            hashlib.sha256(file.read_bytes()).hexdigest()
        )
        for file in sorted(output.glob("tiny-*/nodes/*/policy/**/*.safetensors"))
    }
