"""The notebook runs in a kernel, from its first cell to its last, and shows what is stored in
it."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "notebooks" / "first_run.ipynb"
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")


def execute(notebook: NotebookNode) -> NotebookNode:
    """A copy with new outputs."""
    done = copy.deepcopy(notebook)
    NotebookClient(
        done, timeout=300, startup_timeout=300, resources={"metadata": {"path": str(ROOT)}}
    ).execute()
    return done


def shown(notebook: NotebookNode) -> list[list[tuple[str, str]]]:
    """What every code cell prints and returns, without the numbers, which differ between machines,
    and without what is logged.
    """
    return [_shown_by(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]


def _shown_by(outputs: list[NotebookNode]) -> list[tuple[str, str]]:
    """The text that was printed, which arrives in parts, and the kind of each result."""
    printed = "".join(
        output.text
        for output in outputs
        if output.output_type == "stream" and output.name == "stdout"
    )
    return [
        ("stdout", NUMBER.sub("0", printed)),
        *(_shown(output) for output in outputs if output.output_type != "stream"),
    ]


def _shown(output: NotebookNode) -> tuple[str, str]:
    kinds = sorted(kind for kind in output.data if kind == "image/png") or ["text/plain"]
    return kinds[0], "" if kinds[0] != "text/plain" else NUMBER.sub("0", output.data["text/plain"])


@pytest.mark.exhaustive
def test_the_notebook_runs_and_shows_what_is_stored() -> None:
    stored = nbformat.read(NOTEBOOK, as_version=4)
    assert sum(cell.cell_type == "code" for cell in stored.cells) > 5
    assert ("image/png", "") in [output for outputs in shown(stored) for output in outputs]
    assert shown(execute(stored)) == shown(stored)


def test_a_cell_that_fails_is_found() -> None:
    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(broken)


def test_what_is_stored_names_no_folder_of_the_machine_that_made_it() -> None:
    printed = [
        str(output)
        for cell in nbformat.read(NOTEBOOK, as_version=4).cells
        for output in cell.get("outputs", [])
    ]
    assert len(printed) > 5
    assert [
        text[:200]
        for text in printed
        if re.search(r"(?<![\w/])/(home|root|tmp|usr|opt|work|dev)/", text)
    ] == []
