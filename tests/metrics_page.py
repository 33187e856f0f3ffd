"""Which metrics docs/metrics.md explains, and whether a name is one of them."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
PLACEHOLDER = re.compile(r"<[^>]*>")


def explained() -> list[str]:
    """The names in the first column of the page's tables of metrics, with placeholders as
    ``<reward>``.
    """
    tables = re.findall(r"^\| metric \|.*\n(?:\|.*\n)+", PAGE.read_text(), re.MULTILINE)
    return [
        name
        for table in tables
        for row in table.splitlines()[2:]
        for name in re.findall(r"`([^`]+)`", row.split("|")[1])
    ]


def fits(pattern: str, name: str) -> bool:
    """Whether a name with placeholders stands for another name."""
    return re.fullmatch(".+".join(map(re.escape, PLACEHOLDER.split(pattern))), name) is not None


def unexplained(names: set[str]) -> list[str]:
    """Those of the names that no row stands for. ``stage <stage>/<metric>`` stands for no name that
    has no row of its own.
    """
    rows = [name for name in explained() if name != "stage <stage>/<metric>"]
    return sorted(
        name for name in names if not any(fits(row, name) or fits(name, row) for row in rows)
    )
