"""Prompt files (.txt, .jsonl, .json, .csv, .tsv, .parquet) become prompts. The format is in
``datasets/README.md``.

A record is a row's columns by name, empty for an empty line; a location is the row or line for
error messages.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ebbflow.data.files import (
    check_file,
    parse_json_object,
    read_json_list,
    read_lines,
    shorten_library_error,
)
from ebbflow.data.images import ImageError, load_condition_image
from ebbflow.data.parquet_files import iterate_batches
from ebbflow.data.prompts import PromptError, PromptRow, format_count
from ebbflow.recipe.base import explain_lone_surrogate, sanitize_text, shorten_value

COLUMNS = ("prompt", "negative_prompt", "target", "image")
PROMPT_COLUMNS = {
    "Prompt": "Category",
    "prompt_en": "dimension",
    "text": "question_natural_language",
}
"""How PartiPrompts, VBench and DPG-Bench call the column of the prompt, each with another column
that tells the set.
"""
QUESTION_COLUMNS = (
    "proposition_id",
    "dependency",
    "category_broad",
    "category_detailed",
    "tuple",
    "question_natural_language",
)
"""Of DPG-Bench, which has a row for each question about a prompt."""
QUOTED = re.compile(r'"([^"]*)"|“([^“”]*)”')

Record = dict[str, Any]
Records = Iterator[tuple[str, Record]]


@dataclass(frozen=True)
class ImportReport:
    """What became of the lines of a prompt file.

    Example:
        >>> str(ImportReport("signs.txt", rows=120, duplicates=3, empty_lines=1))
        'signs.txt: 120 prompts kept, 3 duplicates and 1 empty line left out'
    """

    source: str
    rows: int
    duplicates: int
    empty_lines: int

    def __str__(self) -> str:
        return (
            f"{self.source}: {format_count(self.rows, 'prompt')} kept,"
            f" {format_count(self.duplicates, 'duplicate')} and"
            f" {format_count(self.empty_lines, 'empty line')} left out"
        )


def read_prompt_file(path: str | Path) -> tuple[list[PromptRow], ImportReport]:
    """Read prompts from .txt (one per line), .jsonl (one object per line), .json (a list of
    objects), .csv and .tsv (with a header; quotes in a .tsv are text) or .parquet.

    Columns: ``prompt``, and optionally ``negative_prompt``, ``target`` and ``image``; all others
    are kept as metadata. The published files of PartiPrompts, VBench and DPG-Bench are read as they
    are (``PROMPT_COLUMNS``). Without a target the quoted parts of the prompt ("..." or typographic)
    are the target, joined by blanks; a prompt without any has none. White space around prompts is
    cut. An image is a path, or in Parquet the bytes of a file, and several are a list of these
    (``images.load_condition_image``). Of rows with the same prompt, negative prompt, target and
    image the first is kept.

    Raises:
        PromptError: the file or a line of it cannot be used.
    """
    path = Path(path)
    check_file(path, READERS, "prompts.source", PromptError)
    rows: dict[tuple[str, str, str | None, bytes | None], PromptRow] = {}
    duplicates = 0
    num_empty_lines = 0
    for location, record in _merge_records(READERS[path.suffix.lower()](path)):
        if not record:
            num_empty_lines += 1
            continue
        row = _parse_row(record, location, path)
        # Two equal rows could be split, one to train on and one to judge by.
        key = (row.prompt, row.negative_prompt, row.target, row.image)
        duplicates += key in rows
        rows.setdefault(key, row)
    if not rows:
        raise PromptError(
            f"{path}: no prompt in it, only {format_count(num_empty_lines, 'empty line')}; write at"
            " least one"
        )
    return list(rows.values()), ImportReport(path.name, len(rows), duplicates, num_empty_lines)


# Files to records.


def _iterate_txt_records(path: Path) -> Records:
    for location, line in read_lines(path, PromptError):
        yield location, {"prompt": line} if line.strip() else {}


def _iterate_jsonl_records(path: Path) -> Records:
    for location, line in read_lines(path, PromptError):
        record: Record = {}
        if line.strip():
            # An object without any key is a row without a prompt, not an empty line.
            record = parse_json_object(line, location, PromptError) or {"prompt": None}
        yield location, record


def _iterate_json_records(path: Path) -> Records:
    for number, item in enumerate(read_json_list(path, PromptError), start=1):
        location = f"{path}, item {number}"
        if not isinstance(item, dict):
            raise PromptError(
                f'{location}: {shorten_value(item)} is not an object; write {{"prompt": "...",'
                " ...}"
            )
        yield location, item or {"prompt": None}


def _iterate_csv_records(path: Path, tabs: bool = False) -> Records:
    lines = (line for _, line in read_lines(path, PromptError))
    if tabs:
        # The quotes of PartiPrompts, which is published as .tsv, are text and need no partner.
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        reader = csv.reader(lines, strict=True)
    header: list[str] | None = None
    # next() in a loop, since an error of csv has no line: the reader knows how many it has read.
    # A quoted field may hold newlines, so that a record is not always one line.
    while True:
        location = f"{path}, line {reader.line_num + 1}"
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise PromptError(
                f"{location}: not CSV ({error}); quote fields that hold commas or quotes, double"
                " these"
            ) from None
        if not any(field.strip() for field in fields):
            yield location, {}
        elif header is None:
            header = [field.strip() for field in fields]
            _check_header(header, location)
        elif len(fields) != len(header):
            raise PromptError(
                f"{location}: {shorten_value(','.join(fields))} has"
                f" {format_count(len(fields), 'field')} and the header {len(header)}; "
                + ("take tabs out of fields" if tabs else "quote fields that hold a comma")
            )
        else:
            yield location, dict(zip(header, fields, strict=True))


def _iterate_parquet_records(path: Path) -> Records:
    num_rows = 0
    try:
        for batch in iterate_batches(path, PromptError):
            if num_rows == 0:
                _check_header(batch.schema.names, str(path))
            for record in batch.to_pylist():
                num_rows += 1
                yield f"{path}, row {num_rows}", record
    except PromptError:
        raise
    except Exception as error:
        # Arrow, memory and text each raise errors of their own at a damaged file, and at types that
        # Python does not have: no common base.
        raise PromptError(
            f"{path}: not a Parquet file that can be read, after row {num_rows}"
            f" ({shorten_library_error(error)}); write it again, with text and numbers alone"
        ) from None


def _find_prompt_column(names: Collection[str]) -> str:
    """The name of the column that holds the prompt."""
    if "prompt" in names:
        return "prompt"
    # "text" alone could be anything; with the set's other column it is DPG-Bench's prompt.
    published = (
        column for column, other in PROMPT_COLUMNS.items() if column in names and other in names
    )
    return next(published, "prompt")


def _check_header(names: list[str], location: str) -> None:
    if _find_prompt_column(names) not in names:
        raise PromptError(
            f"{location}: no column 'prompt' among {shorten_value(', '.join(names))}; name the"
            " columns in a header"
        )
    # A record is a dictionary, which would silently keep the last of two columns of one name.
    duplicate_columns = sorted({name for name in names if names.count(name) > 1})
    if duplicate_columns:
        raise PromptError(
            f"{location}: the column {shorten_value(duplicate_columns[0])} is there twice; rename"
            " one"
        )


READERS: dict[str, Callable[[Path], Records]] = {
    ".txt": _iterate_txt_records,
    ".jsonl": _iterate_jsonl_records,
    ".json": _iterate_json_records,
    ".csv": _iterate_csv_records,
    ".tsv": partial(_iterate_csv_records, tabs=True),
    ".parquet": _iterate_parquet_records,
}


# Records to rows.


def _merge_records(records: Records) -> Records:
    """One record for each prompt, with the column ``prompt``: DPG-Bench has a row for each
    question, VBench two prompts twice.
    """
    merged: dict[str, tuple[str, Record]] = {}
    for location, record in records:
        column = _find_prompt_column(record)
        named = {"prompt" if name == column else name: value for name, value in record.items()}
        if column == "text":
            # The questions about an item are its rows, and need not follow each other.
            _, item = merged.setdefault(
                f"item {named.get('item_id')}", (location, {"questions": []})
            )
            _add_question(item, named, location)
        elif column == "prompt_en" and isinstance(named["prompt"], str):
            _, item = merged.setdefault(named["prompt"].strip(), (location, named))
            _add_dimensions(item, named)
        else:
            # Every other file has a row for each prompt.
            yield location, named
    yield from merged.values()


def _add_question(item: Record, row: Record, location: str) -> None:
    item["questions"].append({column: row.pop(column, None) for column in QUESTION_COLUMNS})
    texts = {
        text
        for text in (item.get("prompt"), row.get("prompt"))
        if isinstance(text, str) and text.strip()
    }
    # An item without a text here may have one in another row; two different ones are a mistake.
    if len(texts) > 1:
        raise PromptError(
            f"{location}: the item {shorten_value(row.get('item_id'))} has another text than"
            " before; keep to one for an item_id"
        )
    item |= row | {"prompt": next(iter(texts), None)}


def _add_dimensions(item: Record, row: Record) -> None:
    """Add the dimensions of a further row of a prompt, and what VBench needs to judge them."""
    dimensions = item["dimension"]
    new_dimensions = row["dimension"]
    if isinstance(dimensions, list) and isinstance(new_dimensions, list):
        item["dimension"] = [*dimensions, *(one for one in new_dimensions if one not in dimensions)]
    # By dimension: {"appearance_style": {...}}.
    information = item.get("auxiliary_info")
    new_information = row.get("auxiliary_info")
    if isinstance(new_information, dict):
        earlier = information if isinstance(information, dict) else {}
        item["auxiliary_info"] = new_information | earlier


def _parse_row(record: Record, location: str, path: Path) -> PromptRow:
    prompt = _read_text(record, "prompt", location)
    if prompt is None:
        raise PromptError(
            f"{location}: {shorten_value(record.get('prompt'))} is no prompt; give every row a"
            " 'prompt' that is not empty"
        )
    return PromptRow(
        prompt=prompt,
        negative_prompt=_read_text(record, "negative_prompt", location) or "",
        target=_read_text(record, "target", location) or find_quoted_text(prompt),
        source=path.name,
        metadata=_read_metadata(record, location),
        image=_read_condition_image(record, location, path.parent),
        location=location,
    )


def _read_text(record: Record, column: str, location: str) -> str | None:
    """The column without white space around it; None where it is missing, null or blank."""
    value = record.get(column)
    if value is None:
        return None
    if not isinstance(value, str):
        raise PromptError(
            f"{location}: {column} = {shorten_value(value)} is not text; write it as a string"
        )
    _check_encodable(value, f"{location}: {column}")
    return value.strip() or None


def find_quoted_text(prompt: str) -> str | None:
    """Return what stands in quotes in a prompt; None where nothing does."""
    # QUOTED has a group for each kind of quotes, of which one is empty.
    parts = [(straight or curly).strip() for straight, curly in QUOTED.findall(prompt)]
    return " ".join(part for part in parts if part) or None


def _read_condition_image(record: Record, location: str, folder: Path) -> bytes | None:
    """The image to edit as PNG, or several; None where it is missing, null or blank."""
    # Bytes of a file come from Parquet alone; in every other format it is a path.
    value = record.get("image")
    if isinstance(value, list):
        wrong = [item for item in value if not isinstance(item, str | bytes) or not item]
        if wrong:
            raise PromptError(
                f"{location}: image = {shorten_value(value)} has {shorten_value(wrong[0])}, which"
                " is no image; write paths, or in Parquet bytes"
            )
    elif not isinstance(value, bytes):
        value = _read_text(record, "image", location)
    if value is None:
        return None
    try:
        return load_condition_image(value, folder)
    except ImageError as error:
        raise PromptError(f"{location}: image = {shorten_value(value)} {error}") from None


def _read_metadata(record: Record, location: str) -> str:
    # Sorted keys and no escapes: the same columns are the same text, whatever their order.
    others = {column: value for column, value in record.items() if column not in COLUMNS}
    try:
        text = json.dumps(others, sort_keys=True, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        columns = sanitize_text(", ".join(others))
        raise PromptError(
            f"{location}: the columns {columns} cannot be kept as JSON ({error}); make them text"
        ) from None
    _check_encodable(text, f"{location}: metadata")
    return text


def _check_encodable(text: str, location: str) -> None:
    reason = explain_lone_surrogate(text)
    if reason:
        raise PromptError(f"{location} = {shorten_value(text)} {reason}")
