"""The fenced blocks of a page, and how each is run.

A fence names its language. ``sh`` and ``python`` blocks are commands and code, ``yaml`` blocks are
keys of a recipe; those of a page run in their order, in one folder that looks like a clone. What is
special about a block stands in a comment above it, which readers do not see:

- ``<!-- test: exhaustive -->``: it takes minutes, so only ``make test-all`` runs it.
- ``<!-- test: no, needs docker -->``: no test runs it, and why. Its commands must exist all the
  same.

A block below a paragraph that is nothing but a path in backticks is that file. An ``output`` block
is what the block above it prints; ``...`` stands for anything.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import click
import yaml
from markdown_it import MarkdownIt

from ebbflow.cli import main
from ebbflow.recipe import Recipe, RecipeError
from tests.forked import run_forked
from tests.mlflow_settings import restored_tracking_uri

ROOT = Path(__file__).parents[1]
PLAIN = re.compile(r"(ebbflow|pyflyte)( [\w./@-]+)+")
"""A command that needs no shell."""
MARK = re.compile(r"<!-- test: (exhaustive|no, (?:.+)) -->")
FOLDERS = (
    "benchmarks",
    "containers",
    "datasets",
    "docs",
    "ebbflow",
    "examples",
    "tasks",
    "tests",
    "workflows",
)
FILES = ("Makefile", "README.md", "constraints.txt", "pyproject.toml")


@dataclass(frozen=True)
class Block:
    """A fenced block; ``file`` is the path that it has, if it is a file, and ``output`` what it
    prints, if its page says so.
    """

    page: str
    line: int
    language: str
    text: str
    mark: str
    file: str | None
    output: str | None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


class BlockError(AssertionError):
    """A block failed, or printed something else."""


def blocks_of(text: str, page: str) -> list[Block]:
    """The fences of a page in their order; an ``output`` block belongs to the one above it."""
    tokens = MarkdownIt().parse(text)
    blocks: list[Block] = []
    for index, token in enumerate(tokens):
        if token.type != "fence":
            continue
        assert token.map is not None
        if token.info == "output":
            blocks[-1] = Block(**{**vars(blocks[-1]), "output": token.content})
            continue
        before = tokens[index - 1] if index else None
        comment = (
            before.content.strip() if before is not None and before.type == "html_block" else ""
        )
        mark = MARK.fullmatch(comment)
        if comment.startswith("<!-- test") and not mark:
            raise BlockError(
                f"{page}:{token.map[0]}: {comment!r} is no mark; take 'test: exhaustive' or 'test:"
                " no, REASON'"
            )
        path = (
            re.fullmatch(r"`([\w./-]+)`", tokens[index - 2].content)
            if index > 1 and tokens[index - 2].type == "inline"
            else None
        )
        found = (mark.group(1) if mark else "", path.group(1) if path else None)
        blocks.append(Block(page, token.map[0] + 1, token.info, token.content, *found, None))
    return blocks


def make_clone(folder: Path) -> Path:
    """A folder with copies of the repository's files, and a link to the environment in ``.venv``,
    as after ``make setup``.
    """
    folder.mkdir()
    for name in FOLDERS:
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "reference")
        )
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "runs" / "flyte").mkdir(parents=True)
    return folder


def run_block(block: Block, clone: Path, names: Mapping[str, str] | None = None) -> None:
    """Run a block, or write it where it is a file, and compare what it prints.

    Args:
        names: what the page made up, such as the name of a run, and what it is here.

    Raises:
        BlockError: it failed, or printed something else than the page says.
    """
    text = block.text
    for made_up, real in (names or {}).items():
        text = text.replace(made_up, real)
    if block.file:
        # The clone's may be made smaller.
        known = [path for path in (ROOT / block.file, clone / block.file) if path.exists()]
        if not known:
            (clone / block.file).write_text(text)
        elif known[0].read_text() != text:
            raise BlockError(f"{block.where}: {block.file} is another file in the repository")
        return
    printed = {"sh": _run_shell, "python": _run_python, "yaml": _read_keys}[block.language](
        block, text, clone
    )
    if block.output is not None and not _matches(block.output, printed):
        raise BlockError(f"{block.where} prints\n{printed}\nand not\n{block.output}")


def _run_shell(block: Block, text: str, clone: Path) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    environment = inherited | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(clone),
        "TMPDIR": str(clone / "runs" / "flyte"),
        "FLYTE_LOCAL_CACHE_ENABLED": "true",
        "EBBFLOW_LOCAL_CACHE": str(clone / "runs" / "flyte" / "cache"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    printed = ""
    for command in split_commands(text):
        # The first block of the README has a shell, and new interpreters as a reader's.
        run = run_forked if PLAIN.fullmatch(" ".join(command)) else _run_interpreter
        done = run(command, cwd=clone, env=environment, timeout=3600)
        printed += done.stdout
        if done.returncode:
            raise BlockError(
                f"{block.where} ended with"
                f" {done.returncode}\n{printed[-2000:]}\n{done.stderr[-3000:]}"
            )
    return printed


def split_commands(text: str) -> list[list[str]]:
    """Split a shell block whose lines are all plain commands of Ebbflow and Flyte into these, which
    start as forks; any other block is one command, a shell.
    """
    lines = [line.partition(" #")[0].strip() for line in text.splitlines()]
    if all(PLAIN.fullmatch(line) for line in lines):
        return [line.split(" ") for line in lines]
    return [["bash", "-euo", "pipefail", "-c", text]]


def _run_interpreter(
    command: list[str], *, cwd: Path, env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout
    )


def _run_python(block: Block, text: str, clone: Path) -> str:
    """In this process, which then has no other variables than before, and no store of MLflow."""
    printed = io.StringIO()
    with patch.dict(os.environ), restored_tracking_uri(), chdir(clone), redirect_stdout(printed):
        try:
            exec(compile(text, block.where, "exec"), {"__name__": "__main__"})
        except Exception as error:
            raise BlockError(f"{block.where}: {type(error).__name__}: {error}") from error
    return printed.getvalue()


def _read_keys(block: Block, text: str, clone: Path) -> str:
    try:
        Recipe.model_validate(yaml.safe_load(text))
    except (RecipeError, yaml.YAMLError) as error:
        raise BlockError(f"{block.where}: {error}") from error
    return ""


def _matches(expected: str, printed: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("..."))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def unknown_commands(text: str) -> list[str]:
    """Of a shell block that is not run: ``make``, ``ebbflow``, ``python -m`` and ``pytest`` on what
    does not exist.
    """
    lines = text.replace("\\\n", " ").splitlines()
    commands = [
        command for line in lines for command in re.split(r"\s[|;&]+\s", line.partition(" #")[0])
    ]
    return [
        f"{command.strip()}: {problem}"
        for command in commands
        if (problem := _problem(_words(command)))
    ]


def _words(command: str) -> list[str]:
    """The words of a command, without the variables that are set for it; placeholders such as <run>
    are words.
    """
    words = shlex.split(
        re.sub(r"<([\w ]+)>", lambda found: found.group(1).replace(" ", "-"), command),
        comments=True,
    )
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    return [Path(words[0]).name, *words[1:]] if words else []


def _problem(words: list[str]) -> str | None:
    match words:
        case ["make", target, *_] if not re.search(
            rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE
        ):
            return "the Makefile has no such target"
        case ["ebbflow", name, *arguments]:
            command = main.commands.get(name)
            if command is None:
                return "ebbflow has no such command"
            try:
                command.make_parser(click.Context(command, info_name=name)).parse_args(
                    list(arguments)
                )
            except click.UsageError as error:
                return error.format_message()
        case ["python", "-m", module, *_] if (
            module.startswith("benchmarks.") and importlib.util.find_spec(module) is None
        ):
            return "there is no such module"
        case ["pytest", *paths] if missing := [
            path
            for path in paths
            if not path.startswith("-") and not (ROOT / path.partition("::")[0]).exists()
        ]:
            return f"{missing} is not there"
    return None
