"""What the docs say about the code and can be read from it: ``python -m benchmarks.doc_facts``
writes the fields of the rows of losses into docs/extending.md and the size of a version's sources
into docs/serving.md. A test compares.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

from ebbflow.algorithms import base
from ebbflow.storage.identity import find_package_roots, list_sources

DOCS = Path(__file__).parents[1] / "docs"
ROWS = (
    base.TrajectoryRows,
    base.ForwardRows,
    base.GradientRows,
    base.DirectAlignRows,
    base.MatchingRows,
    base.SurrogateRows,
)
BEGIN = "<!-- rows: written by python -m benchmarks.doc_facts -->"
END = "<!-- rows: end -->"
SIZE = re.compile(r"(Ebbflow's sources as they were when it was registered \()([\d.]+) MB")


def format_rows() -> str:
    """Format a table of the fields of each kind of rows."""
    parts = []
    for rows in ROWS:
        meanings = read_attributes(rows)
        lines = [f"`{rows.__name__}`:", "", "| field | type | meaning |", "|---|---|---|"]
        for field in dataclasses.fields(rows):
            # A bar would end the cell.
            kind = str(field.type).replace("|", "or")
            lines.append(f"| `{field.name}` | `{kind}` | {meanings[field.name]} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def read_attributes(kind: type[Any]) -> dict[str, str]:
    """Read what the docstring of a class says about its attributes."""
    _, _, text = (kind.__doc__ or "").partition("Attributes:\n")
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", text, re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in entries}


def measure_sources() -> float:
    """Measure the sources that are stored with a version, in megabytes."""
    [root] = find_package_roots("ebbflow")
    files = (root / name for name, _ in list_sources(root))
    return sum(file.stat().st_size for file in files) / 1e6


def replace_rows(text: str) -> str:
    """Return docs/extending.md with the tables of today."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{format_rows()}\n\n{END}{after}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split(":")[0]).parse_args()
    extending = DOCS / "extending.md"
    extending.write_text(replace_rows(extending.read_text()))
    serving = DOCS / "serving.md"
    serving.write_text(SIZE.sub(rf"\g<1>{measure_sources():.1f} MB", serving.read_text()))


if __name__ == "__main__":
    main()
