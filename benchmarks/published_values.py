"""Values of other repositories' files: the key of a YAML or TOML file, an assignment, a default or
an argument of a Python file, a flag of a command in a shell script or a README.

Nothing is executed: Python is parsed, and a shell script's variables are looked up where they are
assigned a constant.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import yaml

MISSING = object()
"""What ``extract_value`` returns for a key that the file has not."""
WORD = re.compile(r""" "[^"]*" | '[^']*' | \S+ """, re.VERBOSE)
"""A word of a command. ``shlex`` would read a whole command in quotes, as of ssh, as one word."""
VARIABLE = re.compile(r"\$\{?(\w+)(?::-([^}]*))?\}?$")


def extract_value(text: str, path: str, key: str) -> Any:
    """Returns the value of ``key`` in a file, ``MISSING`` without one.

    Args:
        text: the file.
        path: its path, whose ending says the kind: .yaml, .toml, .py, .sh or .md.
        key: of YAML and TOML the dotted path (``train.learning_rate``, ``parts.2.rate``). Of
            Python ``--flag``, an argparse default; ``Name(keyword)``, an argument of a call;
            ``name()``, what a function returns; or the target of an assignment
            (``config.train.beta``), the last one. All three after
            ``FUNCTION:`` are looked for in that function alone. Of a command the name of a flag
            (``--cfg``), of a setting (``data.seed`` of ``data.seed=42``) or of a variable.

    Raises:
        ValueError: files of this ending are not read.
    """
    suffix = PurePosixPath(path).suffix
    if suffix in (".yaml", ".yml"):
        return _read_yaml(text, key)
    if suffix == ".py":
        return _read_python(text, key)
    if suffix in (".sh", ".md"):
        return _read_command(text, key)
    if suffix == ".toml":
        return _find_by_path(tomllib.loads(text), key)
    raise ValueError(f"{path}: values are read from .yaml, .toml, .py, .sh and .md files only")


def parse_scalar(text: str) -> Any:
    """Returns the number, list, boolean or text that a word of a command is."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _read_yaml(text: str, key: str) -> Any:
    value = _find_by_path(yaml.safe_load(text), key)
    # YAML 1.1 reads 1e-5, without a point, as text.
    return parse_scalar(value) if isinstance(value, str) else value


def _find_by_path(value: Any, key: str) -> Any:
    """Return what a dotted path leads to; a number is the place in a list."""
    for part in key.split("."):
        if isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            return MISSING
    return value


def _read_python(text: str, key: str) -> Any:
    tree: ast.AST = ast.parse(text)
    function, separator, name = key.rpartition(":")
    if separator:
        found = [node for node in _find_functions(tree) if node.name == function]
        if not found:
            return MISSING
        tree = found[0]
    name = name.strip()
    if name.startswith("--"):
        return _last(_iterate_defaults(tree, name))
    if name.endswith("()"):
        return _last(_iterate_returns(tree, name[:-2]))
    if name.endswith(")"):
        callee, _, keyword = name[:-1].partition("(")
        return _last(_iterate_arguments(tree, callee, keyword))
    return _last(_iterate_assignments(tree, name))


def _last(values: Iterator[Any]) -> Any:
    return next(iter(reversed(list(values))), MISSING)


def _find_functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _evaluate(node: ast.AST) -> Any:
    """Returns the constant that a node is, or its source."""
    try:
        return ast.literal_eval(node)  # type: ignore[arg-type]
    except ValueError:
        return ast.unparse(node)


def _walk_in_order(tree: ast.AST) -> list[ast.AST]:
    """Returns the nodes of a tree in the order of their lines, which ``ast.walk`` has not."""
    return sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0))


def _iterate_assignments(tree: ast.AST, target: str) -> Iterator[Any]:
    for node in _walk_in_order(tree):
        if isinstance(node, ast.Assign) and target in map(ast.unparse, node.targets):
            yield _evaluate(node.value)
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == target:
            yield _evaluate(node.value) if node.value is not None else MISSING


def _iterate_calls(tree: ast.AST, callee: str) -> Iterator[ast.Call]:
    for node in _walk_in_order(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == callee:
            yield node


def _iterate_arguments(tree: ast.AST, callee: str, keyword: str) -> Iterator[Any]:
    for call in _iterate_calls(tree, callee):
        for argument in call.keywords:
            if argument.arg == keyword:
                yield _evaluate(argument.value)


def _iterate_defaults(tree: ast.AST, flag: str) -> Iterator[Any]:
    """Yields the defaults of ``parser.add_argument(flag, default=...)``; a switch is off."""
    for call in _iterate_calls(tree, "add_argument"):
        if flag in [_evaluate(argument) for argument in call.args]:
            options = {option.arg: _evaluate(option.value) for option in call.keywords}
            yield options.get("default", options.get("action") == "store_false")


def _iterate_returns(tree: ast.AST, function: str) -> Iterator[Any]:
    for node in _find_functions(tree):
        if node.name == function:
            for part in ast.walk(node):
                if isinstance(part, ast.Return) and part.value is not None:
                    yield _evaluate(part.value)


def _read_command(text: str, key: str) -> Any:
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    text = text.replace("\\\n", "\n")
    pattern = rf"(?:^|\s)\+*(?P<quote>['\"]?){re.escape(key)}(?P<equals>=|\s+|$)(?P<rest>.*)$"
    matches = list(re.finditer(pattern, text, flags=re.MULTILINE))
    if not matches:
        return MISSING
    match = matches[-1]
    if key.startswith("--") and match["equals"].startswith("\n"):
        return True  # a switch at the end of its line
    if match["quote"]:  # 'key=value'
        return parse_scalar(match["rest"].partition(match["quote"])[0])
    words = []
    for word in WORD.findall(match["rest"]):
        if word.startswith(("--", "#")):
            break
        word = word.strip("\"'\\")
        if word:
            words.append(_resolve_variable(text, word))
        if match["equals"] == "=":
            break
    if not words:
        return True if key.startswith("--") else MISSING
    values = [parse_scalar(word) for word in words]
    return values[0] if len(values) == 1 else values


def _resolve_variable(text: str, word: str) -> str:
    """Returns the constant that a script assigns to ``$name``, the default of ``${name:-default}``
    without one, and any other word as it is.
    """
    match = VARIABLE.match(word)
    if match is None:
        return word
    name, default = match.groups()
    assigned = re.findall(rf"^\s*(?:export\s+)?{name}=(.+)$", text, flags=re.MULTILINE)
    for line in assigned:
        value = WORD.findall(line)[0].strip("\"'")
        inner = VARIABLE.match(value)
        if inner is None:
            return str(value)
        if inner[2] is not None:  # NAME=${NAME:-default}
            return str(inner[2])
    return word if default is None else default
