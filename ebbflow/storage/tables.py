"""Parquet files that are written in streams, appear only when whole, and carry metadata that says
what they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ebbflow.recipe.base import sanitize_text
from ebbflow.storage.disk import atomic_write

_METADATA = "ebbflow"
_METADATA_SHA256 = "ebbflow.sha256"
"""Keys in the footer of the file. The footer of a Parquet file has no checksum of its own."""

ROW_GROUP_BYTES = 2 * 2**20
"""Of a row group at most, unless a row is larger: readers hold a few row groups in memory."""


class TableError(Exception):
    """A table that cannot be used: names the file, what is wrong and the fix."""


def write_table(
    path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], metadata: dict[str, Any]
) -> None:
    """Write record batches as they come (zstd); memory is bounded by one batch. See
    ``open_table_writer``.
    """
    with open_table_writer(path, schema, metadata) as write:
        for batch in batches:
            write(batch)


@contextmanager
def open_table_writer(
    path: Path, schema: pa.Schema, metadata: dict[str, Any]
) -> Iterator[Callable[[pa.RecordBatch], None]]:
    """Yield a function that writes a batch; the table appears when the block ends, and an exception
    leaves nothing behind.

    Binary columns (latents, images) get no dictionary and no statistics, as no two values are the
    same.

    Args:
        metadata: what made the table (seconds, sampler, recipe ...), kept as JSON in the footer; it
            is read when the block ends, so it may be filled while batches are written.

    Raises:
        DiskFullError: no space was left.
    """
    narrow_columns = [
        field.name
        for field in schema
        if not (pa.types.is_binary(field.type) or pa.types.is_fixed_size_binary(field.type))
    ]
    options: dict[str, Any] = {
        "use_dictionary": narrow_columns,
        "write_statistics": narrow_columns,
        "write_page_checksum": True,
    }
    with (
        atomic_write(path) as partial,
        pq.ParquetWriter(partial, schema, compression="zstd", **options) as writer,
    ):
        # Rows per group, from the batch's mean bytes per row: a video is one row of megabytes.
        yield lambda batch: writer.write_batch(
            batch, max(1, len(batch) * ROW_GROUP_BYTES // max(1, batch.nbytes))
        )
        # After the block, which may have added to the metadata. The footer is written at the end of
        # the file, so that this costs no second pass.
        text = json.dumps(metadata, sort_keys=True)
        writer.add_key_value_metadata(
            {_METADATA: text, _METADATA_SHA256: _sha256_of_text(text.encode())}
        )


def read_table(path: Path, schema: pa.Schema | None = None) -> pa.Table:
    """Read a whole table.

    Raises:
        TableError: it is not a whole Parquet file, or has other columns than ``schema``.
    """
    with _open_parquet_file(path) as file:
        _check_columns(path, file.schema_arrow, schema)
        return file.read()


def read_batches(
    path: Path, rows: int = 1024, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Read a table in batches of at most ``rows`` rows; only ``columns``, if they are named."""
    with _open_parquet_file(path) as file:
        yield from file.iter_batches(batch_size=rows, columns=columns)


def read_row_groups(
    path: Path, column: str, wanted: Callable[[int, int], bool]
) -> Iterator[tuple[int, pa.Array]]:
    """A column, row group by row group: the number of the first row, and the values.

    Args:
        wanted: whether to read the row group with rows ``start`` to ``end - 1``; the others are
            skipped.
    """
    # Row groups hold whole rows, so that a few rows cost the reading of a few groups.
    with _open_parquet_file(path) as file:
        start = 0
        for group in range(file.num_row_groups):
            end = start + file.metadata.row_group(group).num_rows
            if wanted(start, end):
                # One column of one row group leaves nothing to read in parallel.
                table = file.read_row_group(group, columns=[column], use_threads=False)
                yield start, table[column].combine_chunks()
            start = end


def read_schema(path: Path) -> pa.Schema:
    """The columns of a table."""
    with _open_parquet_file(path) as file:
        return file.schema_arrow


def check_columns(path: Path, schema: pa.Schema) -> None:
    """Check that a table has the columns of a schema.

    Raises:
        TableError: it has others, or is not a whole Parquet file.
    """
    _check_columns(path, read_schema(path), schema)


def read_column(path: Path, name: str) -> pa.ChunkedArray:
    """One column of a table."""
    return read_columns(path, [name])[name]


def read_columns(path: Path, names: Sequence[str]) -> pa.Table:
    """Some columns of a table.

    Raises:
        TableError: it has no such column, or is not a whole Parquet file.
    """
    with _open_parquet_file(path) as file:
        missing_columns = [name for name in names if name not in file.schema_arrow.names]
        if missing_columns:
            raise TableError(
                f"{path} has no column {missing_columns[0]!r}, only"
                f" {sanitize_text(', '.join(file.schema_arrow.names))}"
            )
        return file.read(columns=list(names))


def read_table_metadata(path: Path) -> dict[str, Any]:
    """The metadata that the table was written with.

    Raises:
        TableError: it is not a whole Parquet file, or not one that ``write_table`` wrote.
    """
    with _open_parquet_file(path) as file:
        footer = file.metadata.metadata or {}
    # Checksums of pages do not cover the footer: a flipped bit there would go unnoticed.
    text = footer.get(_METADATA.encode())
    if text is None:
        raise TableError(f"{path} was not written by Ebbflow: it has no metadata; make it again")
    if footer.get(_METADATA_SHA256.encode()) != _sha256_of_text(text).encode():
        raise TableError(
            f"{path} is damaged: its metadata does not match its sha256; make it again"
        )
    metadata: dict[str, Any] = json.loads(text)
    return metadata


def compute_content_digest(table: pa.Table) -> str:
    """sha256 of the names and values of a table of numbers and text, whatever its row groups; a
    null equals NaN.

    Example:
        A column of scores and one of text, [0.5, null] and ["a", null], are hashed as their names,
        16 bytes of numbers and the JSON text ``["a", null]``.
    """
    digest = hashlib.sha256()
    for name, column in zip(table.column_names, table.columns, strict=True):
        digest.update(json.dumps([name, str(column.type)]).encode())
        if pa.types.is_string(column.type):
            digest.update(json.dumps(column.to_pylist()).encode())
        else:
            digest.update(np.ascontiguousarray(column.to_numpy()).tobytes())
    return digest.hexdigest()


def nan_to_null(values: np.ndarray) -> pa.Array:
    """A float64 column in which NaN (not scored) is null."""
    return pa.array(values, pa.float64(), from_pandas=True)


def count_rows(path: Path) -> int:
    """Number of rows, from the footer."""
    with _open_parquet_file(path) as file:
        rows: int = file.metadata.num_rows
        return rows


@contextmanager
def _open_parquet_file(path: Path) -> Iterator[pq.ParquetFile]:
    """The file while the block reads it; whatever is wrong with it becomes a ``TableError``."""
    # Checksums of the pages are checked as they are read; Arrow writes and reads none by default.
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except TableError:
        raise
    except FileNotFoundError:
        raise TableError(f"no table at {path}") from None
    except Exception as error:
        # Arrow, memory and text each raise errors of their own at a damaged file: no common base.
        reason = sanitize_text(f"{type(error).__name__}: {error}".partition("\n")[0], 300)
        raise TableError(f"{path} is no whole Parquet file ({reason}); make it again") from None


def _check_columns(path: Path, schema: pa.Schema, expected: pa.Schema | None) -> None:
    # Metadata of a schema is what a library adds to a file (pandas, Arrow), no column.
    if expected is not None and not schema.remove_metadata().equals(expected.remove_metadata()):
        raise TableError(
            f"{path} has the columns\n{_format_schema(schema)}\nbut should"
            f" have\n{_format_schema(expected)}"
        )


def _format_schema(schema: pa.Schema) -> str:
    return sanitize_text(
        "; ".join(
            f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in schema
        ),
        1000,
    )


def _sha256_of_text(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
