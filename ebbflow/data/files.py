"""Strict reading of files that somebody else wrote, line by line; the errors name the file and the
line.

``error`` is the exception to raise: ``PromptError`` or ``PairError``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ebbflow.recipe.base import sanitize_text, shorten_value

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_JSON_BYTES = 2**24
"""Of a file that is one JSON value, which takes some ten times as much memory. Published prompt
sets have up to 1 MB.
"""
MAX_LINE_BYTES = 2**20
"""Of a line. A prompt has some kilobytes at most, with all questions about it."""
MAX_ROWS = 10_000_000
"""Of a file: the prompts of a run are in memory."""


def check_file(path: Path, suffixes: Collection[str], key: str, error: type[ValueError]) -> None:
    """Check that there is a file with one of the suffixes; ``key`` of the recipe names it."""
    if path.suffix.lower() not in suffixes:
        raise error(
            f"{path}: its suffix {path.suffix!r} is none of {', '.join(suffixes)}; convert or"
            " rename it"
        )
    # Unlike that of pathlib, this raises nothing for a name that no file can have.
    if not os.path.isfile(path):
        raise error(f"{path}: no such file; check {key}")


def read_lines(
    path: Path, error: type[ValueError], max_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[str, str]]:
    """Location and text of every line. Only newlines end a line: prompts may hold the other
    separators of Unicode.

    Args:
        max_bytes: of a line; a longer one is an error before it is in memory.
    """
    try:
        # Bytes, since text files of Python also end a line at a lone carriage return.
        with path.open("rb") as file:
            read_line = partial(file.readline, max_bytes + 1)
            for number, line in enumerate(iter(read_line, b""), start=1):
                location = f"{path}, line {number}"
                if len(line) > max_bytes:
                    raise error(
                        f"{location}: has more than {max_bytes:,} bytes and begins with"
                        f" {shorten_value(line[:100])}; end each row with a newline"
                    )
                if number > MAX_ROWS:
                    raise error(f"{path}: more than {MAX_ROWS:,} lines; split the file")
                if number == 1:
                    # Windows programs begin UTF-8 files with it; it would be part of the first
                    # prompt, or of the first column's name.
                    line = line.removeprefix(BYTE_ORDER_MARK)
                yield location, _decode_line(line, location, error)
    except OSError as failure:
        raise error(f"{path}: cannot be read ({failure.strerror}); check its permissions") from None


def _decode_line(line: bytes, location: str, error: type[ValueError]) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise error(
            f"{location}: {shorten_value(line)} is not UTF-8 ({failure.reason}); save the file as"
            " UTF-8"
        ) from None


def read_json_list(path: Path, error: type[ValueError]) -> list[Any]:
    """The JSON list that a file is."""
    size = os.path.getsize(path)
    if size > MAX_JSON_BYTES:
        raise error(
            f"{path}: its {size} bytes are more than the {MAX_JSON_BYTES} of a JSON list; convert"
            " it to .jsonl"
        )
    text = "".join(line for _, line in read_lines(path, error, MAX_JSON_BYTES))
    # The hooks make Python's parser strict: it would keep the last of two equal keys, and read NaN.
    # RecursionError is that of lists nested a thousand deep.
    try:
        items = json.loads(
            text, object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_constant
        )
    except (ValueError, RecursionError) as failure:
        raise error(
            f"{path}: {shorten_value(text)} is not JSON ({failure}); for an object per line use"
            " .jsonl"
        ) from None
    if not isinstance(items, list):
        raise error(
            f'{path}: {shorten_value(text)} is not a list; write [{{"prompt": "..."}}, ...]'
        )
    return items


def parse_json_object(line: str, location: str, error: type[ValueError]) -> dict[str, Any]:
    """The JSON object of a line."""
    try:
        record = json.loads(
            line, object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_constant
        )
    except (ValueError, RecursionError) as failure:
        raise error(
            f"{location}: {shorten_value(line)} is not JSON ({failure}); write one JSON object per"
            " line"
        ) from None
    if not isinstance(record, dict):
        raise error(
            f'{location}: {shorten_value(line)} is not an object; write {{"prompt": "...", ...}}'
        )
    return record


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("a key is there twice")
    return record


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def shorten_library_error(error: Exception) -> str:
    """What a library says about a damaged file, on one line."""
    return sanitize_text(str(error).partition("\n")[0] or type(error).__name__, 300)
