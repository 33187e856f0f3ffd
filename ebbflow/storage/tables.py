"""Parquet files that are written in streams, appear only when whole, and say what they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ebbflow.recipe.base import printable
from ebbflow.storage.disk import claimed, remove_abandoned, room_for, unfinished_name

_ABOUT, _ABOUT_DIGEST = b"ebbflow", b"ebbflow.sha256"


class TableError(Exception):
    """A table that cannot be used: names the file, what is wrong and the way out."""


def write_table(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], about: dict[str, Any]) -> None:
    """Write record batches as they come (zstd); memory is bounded by one batch.

    ``about`` says what made the table (seconds, sampler, recipe ...) and is stored as JSON in the file's metadata; it may be
    filled while the batches are being drawn. The file appears under its name only when it is whole.
    """
    with new_table(path, schema, about) as write:
        for batch in batches:
            write(batch)


@contextmanager
def new_table(path: Path, schema: pa.Schema, about: dict[str, Any]) -> Iterator[Callable[[pa.RecordBatch], None]]:
    """Yield what writes a batch; ``write_table`` for when several tables are written at once.

    At the end of the block the table appears; an exception leaves nothing behind.

    Raises:
        DiskFullError: no room was left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path)
    unfinished = unfinished_name(path)
    try:
        with room_for(path):
            unfinished.touch()
            with (
                claimed(unfinished),
                pq.ParquetWriter(unfinished, schema, compression="zstd", write_page_checksum=True) as writer,
            ):
                yield writer.write_batch
                said = json.dumps(about, sort_keys=True)
                writer.add_key_value_metadata({_ABOUT.decode(): said, _ABOUT_DIGEST.decode(): _digest(said.encode())})
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_table(path: Path, schema: pa.Schema | None = None) -> pa.Table:
    """Read a whole table.

    Raises:
        TableError: no whole Parquet file, or columns other than ``schema``'s.
    """
    with _open(path) as file:
        _check(path, file.schema_arrow, schema)
        return file.read()


def read_batches(path: Path, rows: int = 1024) -> Iterator[pa.RecordBatch]:
    """Read a table in batches of at most ``rows`` rows."""
    with _open(path) as file:
        yield from file.iter_batches(batch_size=rows)


def read_schema(path: Path) -> pa.Schema:
    """The columns of a table."""
    with _open(path) as file:
        return file.schema_arrow


def check_columns(path: Path, schema: pa.Schema) -> None:
    """Check that a table has the columns of a schema.

    Raises:
        TableError: it has others, or is no whole Parquet file.
    """
    _check(path, read_schema(path), schema)


def read_column(path: Path, name: str) -> pa.ChunkedArray:
    """One column of a table."""
    with _open(path) as file:
        if name not in file.schema_arrow.names:
            raise TableError(f"{path} has no column {name!r}, only {printable(', '.join(file.schema_arrow.names))}")
        return file.read(columns=[name])[name]


def about_table(path: Path) -> dict[str, Any]:
    """What ``write_table`` was told about the table.

    Raises:
        TableError: no whole Parquet file, or not one that ``write_table`` wrote.
    """
    with _open(path) as file:
        metadata = file.metadata.metadata or {}
    said = metadata.get(_ABOUT)
    if said is None:
        raise TableError(f"{path} was not written by Ebbflow: it does not say what it is; make it again")
    if metadata.get(_ABOUT_DIGEST) != _digest(said).encode():
        raise TableError(f"{path} is damaged: what it says about itself does not fit its sha256; make it again")
    return json.loads(said)


def _digest(said: bytes) -> str:
    """The footer of a Parquet file has no checksum of its own."""
    return hashlib.sha256(said).hexdigest()


def nullable(values: np.ndarray) -> pa.Array:
    """A float64 column in which NaN (not scored) is null."""
    return pa.array(values, pa.float64(), from_pandas=True)


def row_count(path: Path) -> int:
    """Rows of a table, from its footer."""
    with _open(path) as file:
        return file.metadata.num_rows


@contextmanager
def _open(path: Path) -> Iterator[pq.ParquetFile]:
    """The file, for as long as the block reads it; whatever is wrong with it is a ``TableError``."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except TableError:
        raise
    except FileNotFoundError:
        raise TableError(f"no table at {path}") from None
    except Exception as error:  # what is damaged can look like anything: Arrow has a dozen errors, memory and text their own
        reason = printable(f"{type(error).__name__}: {error}".partition("\n")[0], 300)
        raise TableError(f"{path} is no whole Parquet file ({reason}); make it again") from None


def _check(path: Path, found: pa.Schema, expected: pa.Schema | None) -> None:
    if expected is not None and not found.remove_metadata().equals(expected.remove_metadata()):
        raise TableError(f"{path} has the columns\n{_listed(found)}\nbut should have\n{_listed(expected)}")


def _listed(schema: pa.Schema) -> str:
    return printable("; ".join(f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in schema), 1000)
