"""How many cases of bad input there are."""

from __future__ import annotations

import ast
from pathlib import Path

AREAS = ("recipes", "prompts", "pairs", "shards", "policies", "rewards")


def counts(path: Path) -> list[int]:
    """Of every test under ``@cases(count, ...)``, which itself fails when it runs fewer."""
    tests = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    decorators = [
        decorator
        for test in tests
        for decorator in test.decorator_list
        if isinstance(decorator, ast.Call)
    ]
    return [call.args[0].value for call in decorators if getattr(call.func, "id", None) == "cases"]


def test_there_are_more_than_a_thousand_cases_and_some_in_every_area() -> None:
    found = {area: sum(counts(Path(__file__).with_name(f"test_bad_{area}.py"))) for area in AREAS}
    assert min(found.values()) >= 100, found
    assert sum(found.values()) >= 1000, found
