"""The house's rules for names and lines, as far as a program can count them (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("ebbflow", "tasks", "workflows", "benchmarks")
MAX_COLUMNS = 100
SMALL_HELPER_LINES = 6
POSITIONS = {
    "about",
    "after",
    "again",
    "apart",
    "at",
    "before",
    "beside",
    "between",
    "nowhere",
    "there",
    "under",
}
PARTICIPLES = {"found", "given", "held", "kept", "made", "shown", "taken", "told"}
NOT_PARTICIPLES = {"embed", "feed", "led", "need", "red", "seed", "shed", "speed"}
PRAGMAS = ("# noqa", "# type:", "# pragma")
PRAGMA = re.compile(r"  # (noqa|type:)[^#]*$")
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source(NamedTuple):
    path: Path
    text: str
    nodes: list[ast.AST]

    @property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return [
        Source(path.relative_to(ROOT), text, list(ast.walk(ast.parse(text))))
        for path in paths
        for text in [path.read_text()]
    ]


@pytest.fixture(scope="module")
def num_lines(sources: list[Source]) -> int:
    return sum(len(source.text.splitlines()) for source in sources)


@pytest.fixture(scope="module")
def names(sources: list[Source]) -> list[str]:
    """Names of all functions without leading underscores; dunder methods are Python's own."""
    functions = [function for source in sources for function in source.functions]
    return [node.name.strip("_") for node in functions if not node.name.startswith("__")]


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
    sources: list[Source], num_lines: int
) -> None:
    pairs = [
        f"{source.path}:{node.lineno}"
        for source in sources
        for node in source.nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    ]
    assert len(pairs) / num_lines * 1000 <= 2, pairs


def test_values_are_assigned_before_they_are_tested(sources: list[Source], num_lines: int) -> None:
    walruses = [
        f"{source.path}:{node.lineno}"
        for source in sources
        for node in source.nodes
        if isinstance(node, ast.NamedExpr)
    ]
    assert len(walruses) / num_lines * 1000 <= 1, walruses


def test_conditions_stand_before_loops(sources: list[Source]) -> None:
    """No ``for x in xs if condition else ()`` and no ``[x] * condition``."""
    loops = [
        f"{source.path}:{node.iter.lineno}"
        for source in sources
        for node in source.nodes
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.IfExp)
    ]
    repeated = [
        f"{source.path}:{node.lineno}"
        for source in sources
        for node in source.nodes
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult)
        and isinstance(node.left, ast.List)
        and _is_condition(node.right)
    ]
    assert loops + repeated == []


def _is_condition(node: ast.expr) -> bool:
    if isinstance(node, ast.Name | ast.Attribute):
        name = node.id if isinstance(node, ast.Name) else node.attr
        return re.match(r"(is|has|with|needs|uses)_", name) is not None
    is_bool_call = (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("bool", "any", "all", "isinstance")
    )
    return is_bool_call or isinstance(node, ast.Compare | ast.BoolOp)


def test_lines_fit_the_limit(sources: list[Source]) -> None:
    """A pragma at the end of a line counts for nothing, as with ruff."""
    long = [
        f"{source.path}:{number}"
        for source in sources
        for number, line in enumerate(source.text.splitlines(), 1)
        if len(PRAGMA.sub("", line)) > MAX_COLUMNS
    ]
    assert long == []


def test_small_helpers_have_several_callers(sources: list[Source], num_lines: int) -> None:
    small = [
        f"{source.path}: {function.name}"
        for source in sources
        for function in source.functions
        if _is_small_helper(function) and _count_mentions(source, function.name) == 2
    ]
    assert len(small) / num_lines * 1000 <= 3, small


def _is_small_helper(function: Function) -> bool:
    if not re.match("_[^_]", function.name) or function.decorator_list:
        return False
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return bool(body) and (body[-1].end_lineno or 0) - body[0].lineno < SMALL_HELPER_LINES


def _count_mentions(source: Source, name: str) -> int:
    return len(re.findall(rf"\b{name}\b", source.text))


def test_comments_say_why_often_enough(sources: list[Source], num_lines: int) -> None:
    count = sum(1 for source in sources for _ in _list_comments(source.text))
    assert count / num_lines * 100 >= 4


def _list_comments(text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(PRAGMAS):
            yield token.string


def test_docstrings_begin_with_a_verb_or_a_noun(sources: list[Source]) -> None:
    begin_with_of = [
        f"{source.path}: {node.name}"
        for source in sources
        for node in source.nodes
        if isinstance(node, Function | ast.ClassDef)
        and (ast.get_docstring(node) or "").startswith("Of ")
    ]
    assert begin_with_of == []
