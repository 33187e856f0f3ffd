"""The house's rules for names and lines, as far as a program can count them (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("ebbflow", "tasks", "workflows", "benchmarks")
POSITIONS = {
    "about",
    "after",
    "again",
    "apart",
    "at",
    "before",
    "beside",
    "between",
    "there",
    "under",
}
PARTICIPLES = {"found", "given", "held", "kept", "made", "shown", "taken", "told"}
NOT_PARTICIPLES = {"embed", "feed", "led", "need", "red", "seed", "shed", "speed"}


def _parse_files() -> Iterator[ast.AST]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield ast.parse(path.read_text())


@pytest.fixture(scope="module")
def nodes() -> list[ast.AST]:
    return [node for tree in _parse_files() for node in ast.walk(tree)]


@pytest.fixture(scope="module")
def names(nodes: list[ast.AST]) -> list[str]:
    """Names of all functions without leading underscores; dunder methods are Python's own."""
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [n.name.strip("_") for n in functions if not n.name.startswith("__")]


@pytest.fixture(scope="module")
def num_lines() -> int:
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_at_most_a_quarter_of_function_names_is_one_word(names: list[str]) -> None:
    one_word = [name for name in names if "_" not in name]
    assert len(one_word) / len(names) <= 0.25


def test_function_names_are_long_enough_to_be_guessed(names: list[str]) -> None:
    assert mean(map(len, names)) >= 13


def test_no_function_is_named_by_a_bare_position(names: list[str]) -> None:
    assert sorted(POSITIONS.intersection(names)) == []


def test_hardly_any_function_is_named_by_a_bare_participle(names: list[str]) -> None:
    bare = [
        name
        for name in names
        if name in PARTICIPLES
        or (name.endswith("ed") and "_" not in name and name not in NOT_PARTICIPLES)
    ]
    assert len(bare) / len(names) <= 0.005, bare


def test_unrelated_values_are_assigned_on_lines_of_their_own(
    nodes: list[ast.AST], num_lines: int
) -> None:
    pairs = [
        node
        for node in nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    ]
    assert len(pairs) / num_lines * 1000 <= 2
