"""Prompt files of users (.txt, .jsonl, .csv, .parquet) become prompts. The format is in ``datasets/README.md``.

A record is a row's columns by name, empty for an empty line; a location is the row or line for error messages.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ebbflow.data.files import check_file, first_line, parse_object, read_lines
from ebbflow.data.images import ImageError, condition_image
from ebbflow.data.prompts import PromptError, PromptRow, counted
from ebbflow.recipe.base import lone_surrogate, sanitize, short

COLUMNS = ("prompt", "negative_prompt", "target", "image")
QUOTED = re.compile(r'"([^"]*)"|“([^“”]*)”')

Record = dict[str, Any]
Records = Iterator[tuple[str, Record]]


@dataclass(frozen=True)
class ImportReport:
    """What became of the lines of a prompt file."""

    source: str
    rows: int
    duplicates: int
    empty_lines: int

    def __str__(self) -> str:
        return (
            f"{self.source}: {counted(self.rows, 'prompt')} kept, {counted(self.duplicates, 'duplicate')} "
            f"and {counted(self.empty_lines, 'empty line')} left out"
        )


def read_prompt_file(path: str | Path) -> tuple[list[PromptRow], ImportReport]:
    """Read prompts from .txt (one per line), .jsonl (one object per line), .csv (with a header) or .parquet.

    Columns: ``prompt``, and optionally ``negative_prompt``, ``target`` and ``image``; all others are kept as metadata. Without a
    target the quoted parts of the prompt ("..." or typographic) are the target, joined by blanks; a prompt without any has none.
    White space around prompts is cut. An image is a path, or in Parquet the bytes of a file (``images.condition_image``). Of rows
    with the same prompt, negative prompt, target and image the first is kept.

    Raises:
        PromptError: the file or a line of it cannot be used.
    """
    path = Path(path)
    readers = {".txt": _txt_records, ".jsonl": _jsonl_records, ".csv": _csv_records, ".parquet": _parquet_records}
    check_file(path, readers, "prompts.source", PromptError)
    rows: dict[tuple[str, str, str | None, bytes | None], PromptRow] = {}
    duplicates = empty = 0
    for location, record in readers[path.suffix.lower()](path):
        if not record:
            empty += 1
            continue
        row = _row(record, location, path)
        key = (row.prompt, row.negative_prompt, row.target, row.image)
        duplicates += key in rows
        rows.setdefault(key, row)
    if not rows:
        raise PromptError(f"{path}: no prompt in it, only {counted(empty, 'empty line')}; write at least one")
    return list(rows.values()), ImportReport(path.name, len(rows), duplicates, empty)


# Files to records.


def _txt_records(path: Path) -> Records:
    for location, line in read_lines(path, PromptError):
        yield location, {"prompt": line} if line.strip() else {}


def _jsonl_records(path: Path) -> Records:
    for location, line in read_lines(path, PromptError):
        # An object without any key is a row without a prompt, not an empty line.
        yield location, parse_object(line, location, PromptError) or {"prompt": None} if line.strip() else {}


def _csv_records(path: Path) -> Records:
    reader = csv.reader((line for _, line in read_lines(path, PromptError)), strict=True)
    header: list[str] | None = None
    while True:
        location = f"{path}, line {reader.line_num + 1}"
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise PromptError(f"{location}: not CSV ({error}); quote fields that hold commas or quotes, double these") from None
        if not any(field.strip() for field in fields):
            yield location, {}
        elif header is None:
            header = [field.strip() for field in fields]
            _check_header(header, location)
        elif len(fields) != len(header):
            raise PromptError(
                f"{location}: {short(','.join(fields))} has {counted(len(fields), 'field')} and the header {len(header)}; "
                "quote fields that hold a comma"
            )
        else:
            yield location, dict(zip(header, fields, strict=True))


def _parquet_records(path: Path) -> Records:
    rows = 0
    for batch in _read_parquet(path).to_batches():
        try:
            records = batch.to_pylist()
        except Exception as error:  # as in _read_parquet, and types that Python does not have
            raise PromptError(f"{path}: cannot be read as rows ({first_line(error)}); keep to text and numbers") from None
        for record in records:
            rows += 1
            yield f"{path}, row {rows}", record


def _read_parquet(path: Path) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            table = file.read()
    except Exception as error:  # a damaged file can look like anything: Arrow has a dozen errors, memory and text their own
        raise PromptError(f"{path}: not a Parquet file that can be read ({first_line(error)}); write it again") from None
    _check_header(table.column_names, str(path))
    return table


def _check_header(names: list[str], location: str) -> None:
    if "prompt" not in names:
        raise PromptError(f"{location}: no column 'prompt' among {short(', '.join(names))}; name the columns in a header")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PromptError(f"{location}: the column {short(twice[0])} is there twice; rename one")


# Records to rows.


def _row(record: Record, location: str, path: Path) -> PromptRow:
    prompt = _text(record, "prompt", location)
    if prompt is None:
        raise PromptError(f"{location}: {short(record.get('prompt'))} is no prompt; give every row a 'prompt' that is not empty")
    return PromptRow(
        prompt=prompt,
        negative_prompt=_text(record, "negative_prompt", location) or "",
        target=_text(record, "target", location) or _quoted(prompt),
        source=path.name,
        metadata=_metadata(record, location),
        image=_image(record, location, path.parent),
    )


def _text(record: Record, column: str, location: str) -> str | None:
    """The column without white space around it; None where it is missing, null or blank."""
    value = record.get(column)
    if value is None:
        return None
    if not isinstance(value, str):
        raise PromptError(f"{location}: {column} = {short(value)} is not text; write it as a string")
    _check_encodable(value, f"{location}: {column}")
    return value.strip() or None


def _quoted(prompt: str) -> str | None:
    parts = [(straight or curly).strip() for straight, curly in QUOTED.findall(prompt)]
    return " ".join(part for part in parts if part) or None


def _image(record: Record, location: str, folder: Path) -> bytes | None:
    """The image to edit as PNG; None where it is missing, null or blank."""
    value = record.get("image")
    if not isinstance(value, bytes):
        value = _text(record, "image", location)
    if value is None:
        return None
    try:
        return condition_image(value, folder)
    except ImageError as error:
        raise PromptError(f"{location}: image = {short(value)} {error}") from None


def _metadata(record: Record, location: str) -> str:
    others = {column: value for column, value in record.items() if column not in COLUMNS}
    try:
        text = json.dumps(others, sort_keys=True, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        columns = sanitize(", ".join(others))
        raise PromptError(f"{location}: the columns {columns} cannot be kept as JSON ({error}); make them text") from None
    _check_encodable(text, f"{location}: metadata")
    return text


def _check_encodable(text: str, location: str) -> None:
    if reason := lone_surrogate(text):
        raise PromptError(f"{location} = {short(text)} {reason}")
