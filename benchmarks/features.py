"""The page "Who has what" from its data: ``python -m benchmarks.features`` writes docs/features.md
from docs/features.yaml. With ``--sources FOLDER``, where FOLDER has clones of the libraries, each
phrase is looked up in its file at its commit, and the exit status is 1 if one is not there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.sources import Clones

DOCS = Path(__file__).parents[1] / "docs"
DATA = DOCS / "features.yaml"
PAGE = DOCS / "features.md"
GITHUB = "https://github.com"
HELP = """examples:
  python -m benchmarks.features                      write docs/features.md from its data
  python -m benchmarks.features --sources ../clones  look every source up first
"""


def read_features(path: Path = DATA) -> dict[str, Any]:
    """Returns the data: ``read``, ``libraries``, ``others`` and ``tables``."""
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def locate_source(cell: Mapping[str, str], library: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the repository and the commit at which a cell was read."""
    if "at" in cell:
        repository, commit = cell["at"].split("@")
        return repository, commit
    return library["repository"], library["commit"]


def format_cell(cell: Mapping[str, str] | None, library: Mapping[str, Any]) -> str:
    """Formats another library's cell as a link to its source, "" for what was not found."""
    if cell is None:
        return ""
    if "pull" in cell:
        repository, number = cell["pull"].split("#")
        return f"[{cell['text']}]({GITHUB}/{repository}/pull/{number})"
    repository, commit = locate_source(cell, library)
    return f"[{cell['text']}]({GITHUB}/{repository}/blob/{commit}/{cell['path']})"


def format_table(table: Mapping[str, Any], libraries: Mapping[str, Any]) -> str:
    """Formats one table of the page: a row for each feature, a column for each library."""
    names = [library["name"] for library in libraries.values()]
    lines = [
        f"## {table['title']}",
        "",
        f"| {table['first']} | Ebbflow | {' | '.join(names)} |",
        "|---" * (2 + len(names)) + "|",
    ]
    for row in table["rows"]:
        cells = [format_cell(row.get(key), library) for key, library in libraries.items()]
        columns = [row["what"], row.get("ebbflow", ""), *cells]
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines)


def format_page(features: Mapping[str, Any]) -> str:
    """Formats docs/features.md."""
    libraries = features["libraries"]
    introduction = "\n".join(
        f"- [{library['name']}]({GITHUB}/{library['repository']}) at `{library['commit']}` "
        f"({library['date']}): {library['about']};"
        for library in libraries.values()
    )
    others = "\n".join(
        f"- [{other['name']}]({GITHUB}/{other['repository']}) at `{other['commit']}` "
        f"({other['date']}): {other['about']};"
        for other in features["others"]
    )
    tables = "\n\n".join(format_table(table, libraries) for table in features["tables"])
    return f"""# Who has what

What Ebbflow and five other libraries can do, so that you can choose. Each cell of another library
links to the file at the commit where it was read, or to the merged pull request that added it
later. An empty cell means that we looked at the commits below on {features["read"]} and found
nothing of the kind; a newer version may have it. An empty cell in the column of Ebbflow is
something that Ebbflow does not have.

{introduction[:-1]}.

Libraries for language models were looked at too:

{others[:-1]}.

[From another library](from_other_libraries.md) has the keys of the same run side by side. The page
is written from [features.yaml](features.yaml) by `python -m benchmarks.features`; with
`--sources FOLDER`, a folder of clones, the command looks every source up. If a cell is wrong,
change the data and its source.

{tables}

The last row is the one to weigh most: Ebbflow's formulas are compared with closed forms and with
these libraries ([conformance](conformance.md)), and whole runs are compared on a small model on
CPUs ([league table](../benchmarks/results/algorithms.md)); no large model has been trained with it
here.
"""


def list_sources(features: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    """Yields what a clone can show: name of the cell, repository, commit, path and phrase."""
    for other in features["others"]:
        yield other["name"], other["repository"], other["commit"], other["path"], other["phrase"]
    for table in features["tables"]:
        for row in table["rows"]:
            for key, library in features["libraries"].items():
                cell = row.get(key)
                if cell is not None and "path" in cell:
                    name = f"{row['what']}, {library['name']}"
                    yield name, *locate_source(cell, library), cell["path"], cell["phrase"]


def find_wrong_sources(features: Mapping[str, Any], clones: Clones) -> list[str]:
    """Returns a line for each source whose file is missing, or does not contain its phrase."""
    wrong = []
    for name, repository, commit, path, phrase in list_sources(features):
        text = clones.read(repository, commit, path)
        if text is None:
            wrong.append(f"{name}: {repository} at {commit} has no {path}")
        elif phrase not in text:
            wrong.append(f"{name}: {path} of {repository} at {commit} has no {phrase!r}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.features",
        description=__doc__,
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sources", type=Path, metavar="FOLDER", help="clones of the libraries")
    arguments = parser.parse_args()
    features = read_features()
    if arguments.sources is not None:
        wrong = find_wrong_sources(features, Clones(arguments.sources))
        checked = len(list(list_sources(features)))
        print(f"{checked - len(wrong)} of {checked} sources contain their phrase")
        if wrong:
            print("\n".join(wrong), file=sys.stderr)
            return 1
    PAGE.write_text(format_page(features), encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
