"""The runs in a local output folder, read from their files alone: no store is opened, and nothing
heavy is imported.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ebbflow.formatting import format_duration, format_number
from ebbflow.recipe.base import RecipeError, sanitize_text
from ebbflow.recipe.yaml_text import describe_yaml_error, read_top_scalars
from ebbflow.run_summary import SUMMARY, SummaryError, read_summary
from ebbflow.storage.formats import RUN_FORMAT, RUN_FORMAT_FILE, explain_unknown_format
from ebbflow.storage.locks import LOCK, try_lock

RESOLVED_RECIPE = "recipe.yaml"
"""In a run's folder: its recipe with all defaults, written as the run starts."""
ATTEMPTS = "attempts.jsonl"
"""In a run's folder: a line for each process that worked on it (``record_attempt``)."""
MAX_NAME = 80
"""Characters of a cell. Names come from folders that anybody may have written."""
HEADER = ("run", "recipe", "seed", "state", "reward", "verdict", "cost", "started")


@dataclass(frozen=True)
class ListedRun:
    """A line of ``ebbflow runs``.

    Attributes:
        started: of its first process, seconds since 1970.
        reward: held-out means before and after; None before the run has finished.
        verdict: what became of the candidate.
        cost: money, or GPU-hours or core-hours where no price is known.
        home: its folder, whose name may be longer than that of the line.
    """

    name: str
    recipe: str
    seed: str
    state: str
    started: float
    reward: tuple[float, float] | None = None
    verdict: str = ""
    cost: str = ""
    home: Path = Path()

    def format_cells(self) -> tuple[str, ...]:
        """Write the line as text, in the order of ``HEADER``."""
        reward = " -> ".join(map(format_number, self.reward)) if self.reward else "-"
        started = datetime.fromtimestamp(self.started).strftime("%Y-%m-%d %H:%M")
        shown = (reward, self.verdict or "-", self.cost or "-", started)
        return self.name, self.recipe, self.seed, self.state, *shown


def record_attempt(home: Path) -> None:
    """Record that this process begins or resumes the run in a folder, and since when nobody had
    worked on it.

    Example:
        A run that was killed and resumed ten minutes later::

            {"started": 1764000000.0, "idle_since": null}
            {"started": 1764004200.0, "idle_since": 1764003600.0}
    """
    file = home / ATTEMPTS
    idle_since = None
    if file.is_file():
        # The last sign of life of a process that is dead: what it wrote last, or its own line here.
        written = [path.stat().st_mtime for path in (file, *_iterate_outputs(home))]
        idle_since = max(written)
    with file.open("a", encoding="utf-8") as attempts:
        attempts.write(json.dumps({"started": time.time(), "idle_since": idle_since}) + "\n")


def _iterate_outputs(home: Path) -> Iterator[Path]:
    """Iterate over the files that nodes of a run write."""
    for folder in ("nodes", "checkpoints"):
        yield from (home / folder).rglob("*")


def list_runs(folder: Path) -> list[ListedRun]:
    """List the runs in ``folder``, the newest first; none where there is no such folder."""
    # Only runs have a lock; the folder also holds MLflow's files and Flyte's cache.
    homes = [path.parent for path in folder.glob(f"*/{LOCK}")]
    return sorted(map(_read_run, homes), key=lambda run: run.started, reverse=True)


def describe_runs(runs: list[ListedRun]) -> str:
    """Describe runs as a table."""
    rows = [HEADER, *(run.format_cells() for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _read_run(home: Path) -> ListedRun:
    # A run that failed in its first task may have a lock and nothing else.
    recipe_file = home / RESOLVED_RECIPE
    has_recipe = recipe_file.is_file()
    started = (recipe_file if has_recipe else home / LOCK).stat().st_mtime
    resumed = ""
    default_name = sanitize_text(home.name.rpartition("-")[0], MAX_NAME)
    try:
        recipe = _read_recipe_keys(recipe_file) if has_recipe else {}
        summary = read_summary(home / SUMMARY) if (home / SUMMARY).is_file() else {}
        attempts = _read_attempts(home)
        if attempts:
            started = attempts[0]["started"]
            resumed = _describe_resumes(attempts[1:])
        verdict = ""
        reward = None
        cost = ""
        if summary:
            cost = _describe_cost(summary)
            outcome = "promoted" if summary["promoted"] is True else "not promoted"
            verdict = f"{outcome}, version {sanitize_text(str(summary['model_version']), MAX_NAME)}"
            reward = (float(summary["before"]["reward"]), float(summary["after"]["reward"]))
    except (OSError, SummaryError, RecipeError, KeyError, TypeError, ValueError) as error:
        # Its other runs are still listed.
        reason = sanitize_text(str(error), MAX_NAME)
        state = f"damaged: {reason}"
        return ListedRun(sanitize_text(home.name, MAX_NAME), default_name, "-", state, started)
    seed = recipe.get("seed", "")
    return ListedRun(
        name=sanitize_text(home.name, MAX_NAME),
        recipe=sanitize_text(recipe.get("name", default_name), MAX_NAME),
        seed=seed if seed.isdecimal() else "-",
        state=sanitize_text(_describe_state(home, bool(summary)) + resumed, MAX_NAME),
        started=started,
        reward=reward,
        verdict=verdict,
        cost=cost,
        home=home,
    )


def _describe_cost(summary: dict[str, Any]) -> str:
    """Describe what a run cost; empty for one of an earlier version."""
    ledger = summary.get("cost")
    if not ledger:
        return ""
    total = ledger["parts"]["total"]
    if ledger["currency"]:
        return sanitize_text(f"{float(total['money']):.2f} {ledger['currency']}", MAX_NAME)
    if total["gpu_hours"]:
        return f"{float(total['gpu_hours']):.2f} GPU-h"
    return f"{float(total['core_hours']):.2f} core-h"


def _read_attempts(home: Path) -> list[dict[str, Any]]:
    """Read the attempts of a run; none of a run of an earlier version."""
    file = home / ATTEMPTS
    if not file.is_file():
        return []
    attempts = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for attempt in attempts:
        if not math.isfinite(attempt["started"]):
            raise ValueError(f"{ATTEMPTS} has a start that is no time")
    return attempts


def _describe_resumes(attempts: list[dict[str, Any]]) -> str:
    """Describe how often a run was resumed, and how long nobody worked on it; empty where it was
    not.
    """
    if not attempts:
        return ""
    idle = sum(one["started"] - (one["idle_since"] or one["started"]) for one in attempts)
    times = "once" if len(attempts) == 1 else f"{len(attempts)} times"
    return f", resumed {times} after {format_duration(max(idle, 0.0))} idle"


def _read_recipe_keys(file: Path) -> dict[str, str]:
    """Read the name and the seed of a run's resolved recipe, which anybody may have put there.

    Raises:
        RecipeError: it is no mapping, or these keys hold no scalars.
    """
    # They come first in a recipe, and reading all of it would take a hundred times as long.
    try:
        with file.open(encoding="utf-8") as text:
            return read_top_scalars(text, ("name", "seed"))
    except Exception as error:  # PyYAML's scanner raises errors of many kinds
        raise RecipeError(describe_yaml_error(error, file.name)) from None


def _describe_state(home: Path, finished: bool) -> str:
    """Describe whether a process executes the run, and if it has not finished, the last node that
    it began.
    """
    format_file = home / RUN_FORMAT_FILE
    text = format_file.read_text(errors="replace") if format_file.is_file() else None
    problem = explain_unknown_format(text, RUN_FORMAT)
    if problem:
        return problem
    # The operating system releases the lock of a process that dies, so a free lock means stopped.
    # A finished run that is started again holds the lock, and is "running" until it ends.
    with try_lock(home / LOCK) as free:
        if free and finished:
            return "finished"
    nodes = sorted((path.stat().st_mtime, path.name) for path in home.glob("nodes/*"))
    last = f" in {nodes[-1][1].replace('-', ' ', 1)}" if nodes else ""
    return f"stopped{last}" if free else f"running{last}"
