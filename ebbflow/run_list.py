"""The runs in a local output folder, read from their files alone: no store is opened, and nothing
heavy is imported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from ebbflow.formatting import format_number
from ebbflow.storage.locks import LOCK, try_lock

RESOLVED_RECIPE = "recipe.yaml"
"""In a run's folder: its recipe with all defaults, written as the run starts."""
HEADER = ("run", "recipe", "seed", "state", "reward", "verdict", "started")


@dataclass(frozen=True)
class ListedRun:
    """A line of ``ebbflow runs``.

    Attributes:
        started: seconds since 1970.
        reward: held-out means before and after; None before the run has finished.
        verdict: what became of the candidate.
    """

    name: str
    recipe: str
    seed: str
    state: str
    started: float
    reward: tuple[float, float] | None = None
    verdict: str = ""

    def format_cells(self) -> tuple[str, ...]:
        """Write the line as text, in the order of ``HEADER``."""
        reward = " -> ".join(map(format_number, self.reward)) if self.reward else "-"
        started = datetime.fromtimestamp(self.started).strftime("%Y-%m-%d %H:%M")
        return self.name, self.recipe, self.seed, self.state, reward, self.verdict or "-", started


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
    recipe: dict[str, Any] = {}
    if recipe_file.is_file():
        recipe = yaml.safe_load(recipe_file.read_text())
    summary = _read_summary(home)
    verdict = ""
    if summary:
        outcome = "promoted" if summary["promoted"] else "not promoted"
        verdict = f"{outcome}, version {summary['model_version']}"
    return ListedRun(
        name=home.name,
        recipe=str(recipe.get("name", home.name.rpartition("-")[0])),
        seed=str(recipe.get("seed", "-")),
        state=_describe_state(home, bool(summary)),
        started=(recipe_file if recipe_file.is_file() else home / LOCK).stat().st_mtime,
        reward=(summary["before"]["reward"], summary["after"]["reward"]) if summary else None,
        verdict=verdict,
    )


def _read_summary(home: Path) -> dict[str, Any]:
    """Read what ``report.run_report`` wrote as the run ended; empty before."""
    file = home / "summary.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def _describe_state(home: Path, finished: bool) -> str:
    """Describe whether a process executes the run, and if it has not finished, the last node that
    it began.
    """
    # The operating system releases the lock of a process that dies, so a free lock means stopped.
    # A finished run that is started again holds the lock, and is "running" until it ends.
    with try_lock(home / LOCK) as free:
        if free and finished:
            return "finished"
    nodes = sorted((path.stat().st_mtime, path.name) for path in home.glob("nodes/*"))
    last = f" in {nodes[-1][1].replace('-', ' ', 1)}" if nodes else ""
    return f"stopped{last}" if free else f"running{last}"
