"""The command lines of the benchmarks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PARSED = "arguments"
"""What a benchmark calls the namespace that its parser returns."""


@pytest.mark.parametrize("path", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: path.stem)
def test_every_option_that_a_benchmark_reads_is_one_that_it_declares(path: Path) -> None:
    """No test runs a benchmark for its minutes, and mypy does not know what a namespace has."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    declared = {
        node.args[0].value.lstrip("-").replace("-", "_")
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "add_argument"
        and isinstance(node.args[0], ast.Constant)
    }
    read = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == PARSED
    }
    assert read <= declared
