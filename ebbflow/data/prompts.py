"""Prompt tables: made up or read from a file, split by id, kept as Parquet (``ebbflow.data.schema.PROMPTS``)."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ebbflow.data.condition import ConditionError, condition_image
from ebbflow.data.schema import PROMPTS, SPLITS
from ebbflow.recipe.base import printable, short
from ebbflow.storage.tables import TableError, read_table, write_table

KNOWN_COLUMNS = ("prompt", "negative_prompt", "target", "image")
QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”')


class PromptError(ValueError):
    """Prompts that cannot be used: names the file, the line, the value and the way out."""


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt table."""

    prompt_id: int
    prompt: str
    negative_prompt: str
    target: str | None
    source: str
    split: str
    metadata: str
    image: bytes | None = field(default=None, repr=False)
    """PNG of the picture to edit, for image-to-image models."""


@dataclass(frozen=True)
class PromptRow:
    """A prompt before it has an id and a split."""

    prompt: str
    negative_prompt: str = ""
    target: str | None = None
    source: str = ""
    metadata: str = "{}"
    """Further columns of the source, as a JSON object with sorted keys."""
    image: bytes | None = field(default=None, repr=False)
    """PNG of the picture to edit, for image-to-image models."""


@dataclass(frozen=True)
class ImportReport:
    """What became of the lines of a prompt file."""

    source: str
    rows: int
    duplicates: int
    empty_lines: int

    def __str__(self) -> str:
        return (
            f"{self.source}: {_counted(self.rows, 'prompt')} kept, {_counted(self.duplicates, 'duplicate')} "
            f"and {_counted(self.empty_lines, 'empty line')} left out"
        )


def make_glyph_prompts(count: int, letters: int, seed: int) -> list[PromptRow]:
    """``count`` different random strings of ``letters`` letters A-Z, each as a quoted prompt with itself as the target.

    Raises:
        PromptError: there are not that many strings, or a number is below one.
    """
    if count < 1 or letters < 1:
        raise PromptError(f"count = {count} strings of letters = {letters} cannot be made; both must be at least 1")
    if count > 26**letters:
        raise PromptError(f"there are only {26**letters} strings of {letters} letters, not {count}; lower count or raise letters")
    stream = np.random.Philox(key=seed)
    texts: dict[str, None] = {}
    while len(texts) < count:
        draws = (stream.random_raw((count, letters)) % 26 + ord("A")).astype(np.uint8)
        texts |= dict.fromkeys(row.tobytes().decode("ascii") for row in draws)
    return [PromptRow(prompt=f'"{text}"', target=text, source="glyph") for text in list(texts)[:count]]


def read_prompt_file(path: str | Path) -> tuple[list[PromptRow], ImportReport]:
    """Read prompts from .txt (one a line), .jsonl (one object a line), .csv (with a header) or .parquet.

    Columns: ``prompt``, and optionally ``negative_prompt``, ``target`` and ``image``; all others are kept as metadata. Without a
    target the quoted parts of the prompt ("..." or typographic) are it, joined by blanks; a prompt without any has none. White
    space around prompts is cut. An image is a path, or in Parquet the bytes of a file (``ebbflow.data.condition``). Of rows with
    the same prompt, negative prompt, target and image the first is kept.

    Raises:
        PromptError: the file, or a line of it, is not that.
    """
    path = Path(path)
    readers = {".txt": _txt_records, ".jsonl": _jsonl_records, ".csv": _csv_records, ".parquet": _parquet_records}
    if path.suffix.lower() not in readers:
        raise PromptError(f"{path}: its suffix {path.suffix!r} is none of {', '.join(readers)}; convert or rename it")
    if not os.path.isfile(path):  # which, other than pathlib, has no error of its own for a name that no file can have
        raise PromptError(f"{path}: no such file; check prompts.source")
    rows: dict[tuple[str, str, str | None, bytes | None], PromptRow] = {}
    duplicates = empty = 0
    for place, record in readers[path.suffix.lower()](path):
        if not record:
            empty += 1
            continue
        row = _row(record, place, path)
        key = (row.prompt, row.negative_prompt, row.target, row.image)
        duplicates += key in rows
        rows.setdefault(key, row)
    if not rows:
        raise PromptError(f"{path}: there is no prompt in it, only {_counted(empty, 'empty line')}; write at least one")
    return list(rows.values()), ImportReport(path.name, len(rows), duplicates, empty)


def split_prompts(rows: Sequence[PromptRow], validation: int, held_out: int, seed: int) -> pa.Table:
    """The prompt table: ids 0, 1, ... in order; a seeded permutation of the ids decides the split.

    The split is a function of the number of rows, the sizes and the seed, never of the prompts' text.

    Raises:
        PromptError: nothing would be left to train on.
    """
    if validation < 0 or held_out < 0 or validation + held_out >= len(rows):
        raise PromptError(
            f"{_counted(len(rows), 'prompt')} cannot be split into validation = {validation}, held_out = {held_out} and at least "
            "one to train on; add prompts or lower prompts.validation or prompts.held_out"
        )
    # Sorting raw random numbers: the bit stream of Philox is fixed for good, numpy's own permutation may change.
    order = np.argsort(np.random.Philox(key=seed).random_raw(len(rows)), kind="stable")
    splits = np.full(len(rows), "train", dtype=object)
    splits[order[:validation]] = "validation"
    splits[order[validation : validation + held_out]] = "held_out"
    return pa.Table.from_pylist(
        [{"prompt_id": index, "split": splits[index], **vars(row)} for index, row in enumerate(rows)], schema=PROMPTS
    )


def write_prompts(table: pa.Table, path: str | Path) -> None:
    """Write a prompt table as Parquet: whole or not at all.

    Raises:
        PromptError: the table does not have the schema ``PROMPTS``.
    """
    if not table.schema.equals(PROMPTS):
        raise PromptError(f"{path}: not written, its columns are\n{table.schema}\nMake prompt tables with split_prompts")
    write_table(Path(path), PROMPTS, table.to_batches(), {"splits": Counter(table["split"].to_pylist())})


def read_prompts(path: str | Path, split: str | None = None) -> list[Prompt]:
    """The prompts of a table written by ``write_prompts``, in order of their ids; of one split, or of all.

    Raises:
        PromptError: there is no such split, or the file is not a prompt table.
    """
    if split is not None and split not in SPLITS:
        raise PromptError(f"there is no split {split!r}; take one of {', '.join(SPLITS)}")
    try:
        table = read_table(Path(path), PROMPTS)
    except TableError as error:
        raise PromptError(f"{error}\nMake prompt tables with split_prompts and write_prompts") from None
    chosen = table if split is None else table.filter(pc.equal(table["split"], split))
    return sorted((Prompt(**row) for row in chosen.to_pylist()), key=lambda prompt: prompt.prompt_id)


def require_targets(rows: Sequence[Prompt | PromptRow] | pa.Table, file: str | Path) -> None:
    """Check that every prompt names the text that its image should show, as rewards that read need it.

    Raises:
        PromptError: with the count and the first prompts that do not.
    """
    prompts = rows.to_pylist() if isinstance(rows, pa.Table) else map(vars, rows)
    missing = [row["prompt"] for row in prompts if row["target"] is None]
    if missing:
        shown = "; ".join(short(prompt) for prompt in missing[:3])
        raise PromptError(
            f"{file}: {len(missing)} of {len(rows)} prompts name no text to read, first: {shown}. Put the text in double quotes, "
            "add a 'target' column, or take rewards that do not read"
        )


# From here on: files to records. A record is a row's columns by name, empty for an empty line; its place is for error messages.

Records = Iterator[tuple[str, dict[str, Any]]]


def _txt_records(path: Path) -> Records:
    for place, line in _lines(path):
        yield place, {"prompt": line} if line.strip() else {}


def _jsonl_records(path: Path) -> Records:
    for place, line in _lines(path):
        if not line.strip():
            yield place, {}
            continue
        try:
            record = json.loads(line, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise PromptError(f"{place}: {short(line)} is not JSON ({error}); write one JSON object a line") from None
        if not isinstance(record, dict):
            raise PromptError(f'{place}: {short(line)} is not an object; write {{"prompt": "..."}}')
        yield place, record or {"prompt": None}


def _csv_records(path: Path) -> Records:
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    header: list[str] | None = None
    while True:
        place = f"{path}, line {reader.line_num + 1}"
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise PromptError(f"{place}: not CSV ({error}); quote fields that hold commas or quotes, doubling these") from None
        if not any(field.strip() for field in fields):
            yield place, {}
        elif header is None:
            header = _checked_header([field.strip() for field in fields], place)
        elif len(fields) != len(header):
            raise PromptError(
                f"{place}: {short(','.join(fields))} has {_counted(len(fields), 'field')} and the header {len(header)}; "
                "quote fields that hold a comma"
            )
        else:
            yield place, dict(zip(header, fields, strict=True))


def _parquet_records(path: Path) -> Records:
    table = _read_parquet(path)
    _checked_header(table.column_names, str(path))
    number = 0
    for batch in table.to_batches():
        try:
            records = batch.to_pylist()
        except Exception as error:  # as above, and what has no counterpart in Python
            raise PromptError(f"{path}: cannot be read as rows ({_first_line(error)}); keep to text and numbers") from None
        for record in records:
            number += 1
            yield f"{path}, row {number}", record


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Place and text of every line. Only newlines end a line: prompts may hold the other separators of Unicode."""
    try:
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise PromptError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    for number, line in enumerate(io.BytesIO(content), start=1):
        place = f"{path}, line {number}"
        try:
            yield place, line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise PromptError(f"{place}: {short(line)} is not UTF-8 ({error.reason}); save the file as UTF-8") from None


def _read_parquet(path: Path) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            return file.read()
    except Exception as error:  # what is damaged can look like anything: Arrow has a dozen errors, memory and text their own
        raise PromptError(f"{path}: not a Parquet file that can be read ({_first_line(error)}); write it again") from None


# Records to rows.


def _row(record: dict[str, Any], place: str, path: Path) -> PromptRow:
    prompt = _text(record, "prompt", place)
    if prompt is None:
        raise PromptError(f"{place}: {short(record.get('prompt'))} is no prompt; give every row a 'prompt' that is not empty")
    return PromptRow(
        prompt=prompt,
        negative_prompt=_text(record, "negative_prompt", place) or "",
        target=_text(record, "target", place) or _quoted(prompt),
        source=path.name,
        metadata=_metadata(record, place),
        image=_image(record, place, path.parent),
    )


def _text(record: dict[str, Any], column: str, place: str) -> str | None:
    """The column without white space around it; None where it is missing, null or blank."""
    value = record.get(column)
    if value is None:
        return None
    if not isinstance(value, str):
        raise PromptError(f"{place}: {column} = {short(value)} is not text; write it as a string")
    return _storable(value, f"{place}: {column}").strip() or None


def _image(record: dict[str, Any], place: str, folder: Path) -> bytes | None:
    """The image to edit as PNG; None where it is missing, null or blank."""
    value = record.get("image")
    if not isinstance(value, bytes):
        value = _text(record, "image", place)
    if value is None:
        return None
    try:
        return condition_image(value, folder)
    except ConditionError as error:
        raise PromptError(f"{place}: image = {short(value)} {error}") from None


def _quoted(prompt: str) -> str | None:
    parts = [(straight or curly).strip() for straight, curly in QUOTED.findall(prompt)]
    return " ".join(part for part in parts if part) or None


def _metadata(record: dict[str, Any], place: str) -> str:
    others = {column: value for column, value in record.items() if column not in KNOWN_COLUMNS}
    try:
        text = json.dumps(others, sort_keys=True, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(
            f"{place}: the columns {printable(', '.join(others))} cannot be kept as JSON ({error}); make them text"
        ) from None
    return _storable(text, f"{place}: metadata")


def _storable(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptError(f"{place} = {short(text)} holds half of a surrogate pair; escape characters whole") from None
    return text


def _checked_header(names: list[str], place: str) -> list[str]:
    if "prompt" not in names:
        raise PromptError(f"{place}: no column 'prompt' among {short(', '.join(names))}; name the columns in a header")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PromptError(f"{place}: the column {short(twice[0])} is there twice; rename one")
    return names


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("a key is there twice")
    return record


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _first_line(error: Exception) -> str:
    return printable(str(error).partition("\n")[0])


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
