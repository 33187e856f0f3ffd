"""Parquet files that somebody else wrote, read in streams: a file of a kilobyte can decode to
terabytes, so what it declares and what it decodes to are bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ebbflow.data.files import MAX_LINE_BYTES, MAX_ROWS
from ebbflow.recipe.base import sanitize_text

MIN_BATCH_ROWS = 16
"""Rows of a batch whatever their size: a row can be megabytes."""
MAX_BATCH_ROWS = 4096
MAX_BATCH_BYTES = 2**24
"""What more rows than ``MIN_BATCH_ROWS`` may decode to, by what the file declares and by what a
batch turns out to be.
"""
MAX_VALUES_PER_ROW = 2**26
"""Of a column, on average: a latent of a video has some millions."""
MAX_CHUNK_BYTES = 2**34
"""Of a column in a row group once it is decompressed, which Arrow may read as a whole."""
MAX_IMAGE_BYTES = 2**26
"""Of a cell of bytes, which hold an image as a file."""
MAX_GROWTH = 200
"""Bytes that all rows may decode to, for each byte of the file. Text compresses by 10, and columns
that repeat a sentence by 100."""
MIN_DECODED_BYTES = 2**28
"""Bytes that a file of any size may decode to."""


def iterate_batches(
    path: Path, error: type[ValueError], columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Parquet file, as many at a time as ``MAX_BATCH_BYTES`` allow.

    Text and bytes come dictionary-encoded, as a file may repeat a long text a billion times; those
    in a delta encoding come as they are, since Arrow cannot make a dictionary of them.

    Args:
        error: to raise, ``PromptError`` or ``PairError``.
        columns: those to read; default: all.

    Raises:
        ValueError: ``error``, where the file declares or decodes to more than any data set has.
        Exception: any error of Arrow's for a file that is damaged.
    """
    max_decoded_bytes = max(MIN_DECODED_BYTES, MAX_GROWTH * path.stat().st_size)
    with pq.ParquetFile(path) as file:
        _check_metadata(file.metadata, path, error)
        schema = file.schema_arrow
        delta_encoded = _find_delta_encoded_columns(file.metadata)
        num_rows = _choose_batch_rows(file.metadata, columns, delta_encoded)
    texts = [
        field.name
        for field in schema
        if (_is_text(field.type) or _is_bytes(field.type)) and field.name not in delta_encoded
    ]
    num_decoded_bytes = 0
    with pq.ParquetFile(path, read_dictionary=texts) as file:
        for batch in file.iter_batches(num_rows, columns=columns):
            num_batch_bytes = sum(
                _measure_column(column, f"{path}: the column {name!r}", error)
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
            )
            num_decoded_bytes += num_batch_bytes
            if num_decoded_bytes > max_decoded_bytes:
                raise error(
                    f"{path}: its rows decode to more than {max_decoded_bytes:,} bytes,"
                    f" {MAX_GROWTH} times the file; split the file, or write it without compression"
                    " and dictionaries"
                )
            # A dictionary is small until its reader makes a text of every row.
            size = batch.num_rows if num_batch_bytes <= MAX_BATCH_BYTES else MIN_BATCH_ROWS
            for start in range(0, batch.num_rows, size):
                yield batch.slice(start, size)


def _choose_batch_rows(
    metadata: pq.FileMetaData, columns: Sequence[str] | None, delta_encoded: set[str]
) -> int:
    """Choose how many rows Arrow decodes at a time, by the mean row of the largest row group.

    Args:
        columns: those that are read; None for all.
    """
    largest = 1.0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        num_bytes = 0
        for index in range(row_group.num_columns):
            chunk = row_group.column(index)
            name = chunk.path_in_schema
            if columns is not None and name.partition(".")[0] not in columns:
                continue
            # What a delta encoding decodes to is not declared.
            if name in delta_encoded:
                return MIN_BATCH_ROWS
            # Runs of equal numbers are declared as small as they are written.
            num_bytes += max(chunk.total_uncompressed_size, 8 * chunk.num_values)
        largest = max(largest, num_bytes / max(row_group.num_rows, 1))
    return min(MAX_BATCH_ROWS, max(MIN_BATCH_ROWS, int(MAX_BATCH_BYTES / largest)))


def _check_metadata(metadata: pq.FileMetaData, path: Path, error: type[ValueError]) -> None:
    if metadata.num_rows > MAX_ROWS:
        raise error(
            f"{path}: {metadata.num_rows:,} rows are more than {MAX_ROWS:,}; split the file"
        )
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for index in range(row_group.num_columns):
            chunk = row_group.column(index)
            name = sanitize_text(chunk.path_in_schema, 100)
            if chunk.num_values > MAX_VALUES_PER_ROW * max(row_group.num_rows, 1):
                raise error(
                    f"{path}: the column {name!r} has {chunk.num_values:,} values in"
                    f" {row_group.num_rows:,} rows; at most {MAX_VALUES_PER_ROW:,} are read for a"
                    " row"
                )
            if chunk.total_uncompressed_size > MAX_CHUNK_BYTES:
                raise error(
                    f"{path}: the column {name!r} has {chunk.total_uncompressed_size:,} bytes in a"
                    f" row group; write row groups of at most {MAX_CHUNK_BYTES:,}"
                )


def _find_delta_encoded_columns(metadata: pq.FileMetaData) -> set[str]:
    """Return the names of columns of which a part is delta-encoded, as DuckDB and Spark may write
    text.
    """
    names = set()
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for index in range(row_group.num_columns):
            chunk = row_group.column(index)
            if any(encoding.startswith("DELTA") for encoding in chunk.encodings):
                names.add(chunk.path_in_schema)
    return names


def _measure_column(column: pa.Array, name: str, error: type[ValueError]) -> int:
    """Return how many bytes the rows of a column decode to.

    Raises:
        ValueError: ``error``, where a cell is too large.
    """
    is_dictionary = isinstance(column, pa.DictionaryArray)
    values = column.dictionary if is_dictionary else column
    if not _is_text(values.type) and not _is_bytes(values.type):
        return int(column.nbytes)
    lengths = pc.binary_length(values)
    limit = MAX_LINE_BYTES if _is_text(values.type) else MAX_IMAGE_BYTES
    longest = pc.max(lengths).as_py() or 0
    if longest > limit:
        raise error(f"{name} has a cell of {longest:,} bytes; at most {limit:,} are read")
    if is_dictionary:
        lengths = lengths.take(column.indices)
    return pc.sum(lengths).as_py() or 0


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
