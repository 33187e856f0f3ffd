"""Parquet files that are written in streams, appear only when whole, and say what they are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_ABOUT = b"ebbflow"


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
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished-{os.getpid()}")
    try:
        with pq.ParquetWriter(unfinished, schema, compression="zstd") as writer:
            yield writer.write_batch
            writer.add_key_value_metadata({_ABOUT.decode(): json.dumps(about, sort_keys=True)})
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


def read_column(path: Path, name: str) -> pa.ChunkedArray:
    """One column of a table."""
    with _open(path) as file:
        if name not in file.schema_arrow.names:
            raise TableError(f"{path} has no column {name!r}, only {', '.join(file.schema_arrow.names)}")
        return file.read(columns=[name])[name]


def about_table(path: Path) -> dict[str, Any]:
    """What ``write_table`` was told about the table."""
    with _open(path) as file:
        metadata = file.metadata.metadata or {}
    if _ABOUT not in metadata:
        raise TableError(f"{path} was not written by Ebbflow: it does not say what it is; make it again")
    return json.loads(metadata[_ABOUT])


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
        with pq.ParquetFile(path) as file:
            yield file
    except FileNotFoundError:
        raise TableError(f"no table at {path}") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise TableError(f"{path} is no whole Parquet file ({error}); make it again") from None


def _check(path: Path, found: pa.Schema, expected: pa.Schema | None) -> None:
    if expected is not None and not found.remove_metadata().equals(expected.remove_metadata()):
        raise TableError(f"{path} has the columns\n{found.remove_metadata()}\nbut should have\n{expected.remove_metadata()}")
