"""The page and the JSON of a first hour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.first_hour.runner import Outcome


def summarize(outcomes: Sequence[Outcome]) -> str:
    """Summarise the verdicts, as "12 passed, 1 failed, 3 not measured"."""
    counts = Counter(line.verdict for outcome in outcomes for line in outcome.all_lines)
    return ", ".join(
        f"{counts[verdict]} {verdict}" for verdict in ("passed", "failed", "not measured")
    )


def format_page(outcomes: Sequence[Outcome], machine: Mapping[str, Any]) -> str:
    """Format all verdicts as Markdown, what failed first."""
    lines = [
        f"# The first hour on {machine['device']}",
        "",
        f"{summarize(outcomes)}. Written by `{machine['command']}` at commit {machine['commit']},"
        f" torch {machine['torch']}, {machine['minutes']:.0f} minutes.",
        "",
        "| part | claim | verdict | number | bar | note |",
        "|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        for line in outcome.all_lines:
            note = line.note.replace("|", "/").replace("\n", " ")
            verdict = f"**{line.verdict}**" if line.verdict == "failed" else line.verdict
            cells = (outcome.part.name, line.claim, verdict, line.number, line.bar, note)
            lines.append(f"| {' | '.join(cells)} |")
    failed = [
        outcome
        for outcome in outcomes
        if any(line.verdict == "failed" for line in outcome.all_lines)
    ]
    if failed:
        lines += ["", "What to do:", ""]
        lines += [f"- {outcome.part.name}: {outcome.part.on_failure}." for outcome in failed]
    return "\n".join([*lines, ""])


def build_json(outcomes: Sequence[Outcome], machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same as data."""
    return {
        "machine": dict(machine),
        "parts": [
            {
                "name": outcome.part.name,
                "ending": outcome.ending,
                "seconds": outcome.seconds,
                "lines": [asdict(line) for line in outcome.all_lines],
            }
            for outcome in outcomes
        ],
    }
