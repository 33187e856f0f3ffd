"""A night of kills and bad inputs: ``make soak``.

Whole runs are killed with SIGKILL, all processes at once, at random times, and started again until
they end. Each must end as the run that nothing happened to: the same policies, the same metrics, no
files left over. Then every test of generated bad inputs runs with more inputs than in ``make
test``, drawn anew. The summary names what failed, with the seed that draws it again.

``EBBFLOW_SOAK_POINTS`` (1,000) kills and ``EBBFLOW_SOAK_INPUTS`` (100,000) inputs,
``EBBFLOW_SOAK_SEED`` (the time) draws them, ``EBBFLOW_SOAK_MINUTES`` (no limit) ends either half
earlier. A run that failed stays in ``build/soak``.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "soak"
BAD_INPUTS = sorted((ROOT / "tests" / "faults").glob("test_bad_*.py"))
"""The tests of generated inputs."""
SOAK_CASES = "EBBFLOW_SOAK_CASES"


def main() -> None:
    seed = int(os.environ.get("EBBFLOW_SOAK_SEED") or time.time())
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    lines = [f"# Soak with EBBFLOW_SOAK_SEED={seed}", "", *kills(seed), "", *inputs(seed)]
    (FOLDER / "summary.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    sys.exit(any("FAILED" in line for line in lines))


def kills(seed: int) -> list[str]:
    """Kill runs until the number of points is reached; a line for each run that did not end as the
    undisturbed one.
    """
    from tests.faults.again_cases import run_pipeline_until
    from tests.faults.test_again import RECIPE

    points = int(os.environ.get("EBBFLOW_SOAK_POINTS", "1000"))
    end = _end()
    run_pipeline_until(
        FOLDER / "warm", RECIPE
    )  # the fork server has imported everything: the next run's time is a run's
    start = time.monotonic()
    run_pipeline_until(FOLDER / "whole", RECIPE)
    whole = outcome(FOLDER / "whole")
    seconds = time.monotonic() - start
    done = 0
    failures = []
    runs = 0
    with tqdm(total=points, unit="kill") as bar:
        while done < points and time.monotonic() < end:
            folder = FOLDER / f"run-{runs}"
            draws = random.Random(f"{seed} {runs}")
            runs = runs + 1
            folder.mkdir()
            killed = _kill_until_it_ends(folder, RECIPE, seconds, draws)
            done += len(killed)
            bar.update(len(killed))
            if problem := killed.problem or _difference(folder, whole):
                failures.append(
                    f"- FAILED {folder.relative_to(ROOT)}, killed after {killed} s: {problem}"
                )
            else:
                shutil.rmtree(folder)
    summary = (
        f"{done} kills of {runs} runs of {seconds:.1f} s; {len(failures)} runs did not end as an"
        " undisturbed one."
    )
    return [summary, *failures]


class _Kills(list[float]):
    """Seconds after which each attempt was killed, and what was wrong with the last one."""

    problem: str | None = None


def _kill_until_it_ends(
    folder: Path, recipe: dict[str, Any], seconds: float, draws: random.Random
) -> _Kills:
    from tests.faults.again_cases import start_pipeline

    killed = _Kills()
    while True:
        delay = round(draws.uniform(0, seconds), 3)
        process = start_pipeline(folder, recipe)
        try:
            ended = process.wait(delay)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            killed.append(delay)
            continue
        if ended:
            killed.problem = f"ended with {ended}, see printed.txt"
        return killed


def outcome(folder: Path) -> dict[str, Any]:
    """What a run left, apart from times: policies by digest, metrics, nodes with their state,
    files.
    """
    from tests.faults.test_again import _nodes, _policies, _series

    (run,) = (path for path in (folder / "runs").glob("tiny-*") if path.is_dir())
    return {
        "policies": _policies(folder),
        "metrics": list(_series(folder)),
        "nodes": [(name, node.info.status) for name, node in _nodes(folder)],
        "files": sorted(
            path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()
        ),
    }


def _difference(folder: Path, expected: dict[str, Any]) -> str | None:
    try:
        found = outcome(folder)
    except ValueError as error:  # not one run, or not one folder
        return f"more or less than one run: {error}"
    names = [name for name in expected if found[name] != expected[name]]
    return f"other {', '.join(names)}" if names else None


def inputs(seed: int) -> list[str]:
    """Run the tests of bad inputs; the lines of pytest that say what failed."""
    count = int(os.environ.get("EBBFLOW_SOAK_INPUTS", "100000"))
    minutes = os.environ.get("EBBFLOW_SOAK_MINUTES")
    tests = sum(path.read_text().count("\n@cases(") for path in BAD_INPUTS)
    options = [
        "--no-header",
        "--maxfail",
        "20",
        "--hypothesis-seed",
        str(seed),
        "-p",
        "no:cacheprovider",
    ]
    command = [sys.executable, "-m", "pytest", *map(str, BAD_INPUTS), *options]
    environment = os.environ | {SOAK_CASES: str(max(1, count // tests))}
    log = FOLDER / "inputs.txt"
    with log.open("w") as output:
        # A shell that starts the soak in the background lets its processes ignore SIGINT.
        heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, preexec_fn=heard
        )
        try:
            process.wait(float(minutes) * 60 if minutes else None)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest then says what failed until now
            process.wait()
    printed = log.read_text()
    over = ", stopped as the time was over" if "KeyboardInterrupt" in printed else ""
    failed = [f"- {line}" for line in printed.splitlines() if line.startswith("FAILED")]
    ended = re.findall(r"^.*(?:passed|failed).*$", printed, re.MULTILINE)[-1:]
    return [
        (
            f"Bad inputs, about {count}: {' '.join(ended) or 'FAILED to start'}{over}"
            f" ({log.relative_to(ROOT)})."
        ),
        *failed,
    ]


def _end() -> float:
    minutes = os.environ.get("EBBFLOW_SOAK_MINUTES")
    return time.monotonic() + float(minutes) * 60 if minutes else float("inf")


if __name__ == "__main__":
    main()
