"""The table of what ran, written by the test run itself (``make test-flyte TABLE=path``)."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ebbflow.storage.sources import DIRTY
from tasks.sources import describe_submitted_commit

COMMAND = "make test-flyte FLYTE=host:port IMAGE=... MLFLOW=... OUTPUT=... TABLE=path"
VERSION = "version of "
"""The beginning of the name of a recorded property."""
ROW = re.compile(r"\| (.+?) \| (.*) \|")
COMMIT = "commit of the clone"
COMMANDS = "commands that wrote these rows"
CASES = "| case | result | date | seconds | seen |"


def write_table(path: Path, stats: Mapping[str, list[Any]], seconds: float) -> None:
    """Write each case as a row: its test's docstring, whether it passed, when, seconds, and what it
    recorded.

    Cases of an earlier command keep their rows where the table is of the same commit, and the table
    then says that it is of several commands. One of another commit, or of a clone with changes, is
    written anew.

    Args:
        stats: of pytest's terminal reporter: reports by their outcome.
        seconds: that the command took.
    """
    commit = describe_submitted_commit()
    versions, rows = _read_table(path)
    if versions.get(COMMIT) != commit or commit.endswith(DIRTY):
        versions = {COMMIT: commit}
        rows = {}
    for outcome in ("passed", "failed", "skipped", "error"):
        for report in stats.get(outcome, []):
            if report.when != "call" and report.outcome == "passed":
                continue
            recorded = dict(report.user_properties)
            rows[recorded.get("case", report.nodeid)] = _format_result(report, recorded)
            for name, text in recorded.items():
                if name.startswith(VERSION):
                    versions[name.removeprefix(VERSION)] = text
    versions["flytekit"] = version("flytekit")
    ended = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
    command = f"{seconds / 60:.0f} minutes, ended {ended}"
    versions[COMMANDS] = "; ".join(filter(None, [versions.get(COMMANDS), command]))
    lines = [
        "# The pipeline on Flyte's own engine",
        "",
        f"Written by `{COMMAND}` ([On Flyte](../../docs/flyte.md)).",
        "Cases of a file share executions, for whose end the first of them waits.",
        "",
        "| what | version |",
        "|---|---|",
        *[f"| {name} | {text} |" for name, text in versions.items()],
        "",
        CASES,
        "|---|---|---|---|---|",
        *[f"| {case} | {result} |" for case, result in rows.items()],
    ]
    path.write_text("\n".join(lines) + "\n")


def _read_table(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Read the versions and the cases of a table, by their first cells; empty: there is none."""
    if not path.exists():
        return {}, {}
    head, _, cases = path.read_text().partition(CASES)
    tables = [dict(ROW.findall(part)) for part in (head, cases)]
    tables[0].pop("what", None)
    return tables[0], tables[1]


def _format_result(report: Any, recorded: Mapping[str, Any]) -> str:
    """Format the cells after the first one."""
    seen = recorded.get("seen", "")
    if report.outcome == "skipped":
        seen = str(report.longrepr[2]).removeprefix("Skipped: ")
    if report.outcome == "failed":
        seen = str(report.longrepr.reprcrash.message).splitlines()[0][:200]
    result = {"skipped": "not run"}.get(report.outcome, report.outcome)
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    cells = [result, today, f"{report.duration:.0f}", seen]
    return " | ".join(str(cell).replace("|", "/").strip() for cell in cells)
