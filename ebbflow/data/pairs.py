"""Files of preference pairs: a prompt with a chosen and a rejected image or latent, read in streams
and checked row by row.

The format is in ``datasets/README.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ebbflow.data.files import check_file, parse_json_object, read_lines, shorten_library_error
from ebbflow.data.images import ImageError, read_image
from ebbflow.recipe.base import explain_lone_surrogate, sanitize_text, shorten_value

IMAGES = ("chosen", "rejected")
LATENTS = ("chosen_latent", "rejected_latent")
ROWS_PER_BATCH = 16
"""Of a Parquet file: a row can be megabytes."""


class PairError(ValueError):
    """Preference pairs that cannot be used: names the file, the row or line, the value and the
    fix."""


@dataclass(frozen=True)
class Pair:
    """One row of a pairs file.

    Attributes:
        number: of the row in the file, from zero.
        location: the file and the row, for error messages.
        columns: ``IMAGES`` or ``LATENTS``: what the two sides are.
        chosen: an image, uint8 RGB [height, width, 3], or the elements of a latent, finite float32
            [D].
        rejected: the same.
    """

    number: int
    location: str
    prompt: str
    columns: tuple[str, str]
    chosen: np.ndarray
    rejected: np.ndarray

    @property
    def is_tie(self) -> bool:
        """Whether the sides are equal, so that there is nothing to learn."""
        return np.array_equal(self.chosen, self.rejected)


def read_pairs(path: Path) -> Iterator[Pair]:
    """Every pair of a file with its images or latents; memory is bounded by a few rows.

    Raises:
        PairError: the file or a row cannot be used.
    """
    for number, location, record in _iterate_records(path, set()):
        columns = IMAGES if IMAGES[0] in record else LATENTS
        read = _parse_image if columns == IMAGES else _parse_latent
        chosen, rejected = (
            read(record[column], f"{location}: {column}", path.parent) for column in columns
        )
        yield Pair(
            number, location, _parse_prompt(record["prompt"], location), columns, chosen, rejected
        )


def read_pair_prompts(path: Path, ignored: set[str]) -> Iterator[tuple[int, str]]:
    """Number and prompt of every pair; reads no image and no latent.

    Args:
        ignored: receives the names of the columns that pairs do not use.

    Raises:
        PairError: the file, its columns or a prompt cannot be used.
    """
    for number, location, record in _iterate_records(path, ignored, prompts_only=True):
        yield number, _parse_prompt(record["prompt"], location)


def check_pairs(path: Path) -> None:
    """Check the file, its columns and its first row.

    Raises:
        PairError: one of them cannot be used.
    """
    next(read_pairs(path))


# Files to records. A record is a row's columns by name; a location is the row for error messages.

Record = dict[str, Any]


def _iterate_records(
    path: Path, ignored: set[str], prompts_only: bool = False
) -> Iterator[tuple[int, str, Record]]:
    check_file(path, (".parquet", ".jsonl"), "the stage's 'pairs'", PairError)
    rows = (
        _iterate_parquet_records(path, ignored, prompts_only)
        if path.suffix.lower() == ".parquet"
        else _iterate_jsonl_records(path, ignored)
    )
    number = -1
    for number, (location, record) in enumerate(rows):
        yield number, location, record
    if number < 0:
        raise PairError(f"{path}: no pair in it; write at least one")


def _iterate_parquet_records(
    path: Path, ignored: set[str], prompts_only: bool
) -> Iterator[tuple[str, Record]]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            used = ["prompt", *_find_side_columns(names, str(path))]
            ignored.update(set(names).difference(used))
            for batch in file.iter_batches(
                ROWS_PER_BATCH, columns=["prompt"] if prompts_only else used
            ):
                for row in range(len(batch)):
                    number += 1
                    yield (
                        f"{path}, row {number}",
                        {name: batch[name][row] for name in batch.schema.names},
                    )
    except PairError:
        raise
    except Exception as error:
        # Arrow, memory and text each raise errors of their own at a damaged file: no common base.
        reason = shorten_library_error(error)
        raise PairError(
            f"{path}: not a Parquet file that can be read, after row {number} ({reason}); write it"
            " again"
        ) from None


def _iterate_jsonl_records(path: Path, ignored: set[str]) -> Iterator[tuple[str, Record]]:
    for location, line in read_lines(path, PairError):
        if text := line.removeprefix(
            "\ufeff"
        ).strip():  # files that were joined have byte order marks in the middle
            record = parse_json_object(text, location, PairError)
            if _find_side_columns(record, location) == LATENTS:
                raise PairError(
                    f"{location}: latents are read from Parquet only; write the pairs as a .parquet"
                    " file"
                )
            ignored.update(record.keys() - {"prompt", *IMAGES})
            yield location, record


def _find_side_columns(names: Iterable[str], location: str) -> tuple[str, str]:
    """The two columns that make a pair."""
    names = list(names)
    listed = sanitize_text(", ".join(names), 300)
    if "prompt" not in names:
        raise PairError(
            f"{location}: no column 'prompt' among {listed}; name the columns as datasets/README.md"
            " says"
        )
    found = [sides for sides in (IMAGES, LATENTS) if set(sides) <= set(names)]
    if not found:
        needed = " or ".join(" and ".join(sides) for sides in (IMAGES, LATENTS))
        raise PairError(
            f"{location}: a pair needs {needed}, and there is {listed}; rename the columns"
        )
    if len(found) > 1:
        raise PairError(
            f"{location}: both images and latents; remove {' and '.join(IMAGES)} to train on the"
            " latents"
        )
    if twice := [name for name in ("prompt", *found[0]) if names.count(name) > 1]:
        raise PairError(f"{location}: the column {twice[0]!r} is there twice; rename one")
    return found[0]


# Records to prompts, images and latents. Values are Arrow scalars, or what JSON held.


def _parse_prompt(value: Any, location: str) -> str:
    value = _to_plain_value(value)
    if not isinstance(value, str) or not value.strip():
        raise PairError(
            f"{location}: {shorten_value(value)} is no prompt; give every row a 'prompt' that is"
            " not empty"
        )
    if reason := explain_lone_surrogate(value):
        raise PairError(f"{location}: prompt = {shorten_value(value)} {reason}")
    return value.strip()


def _parse_image(value: Any, location: str, folder: Path) -> np.ndarray:
    """uint8 RGB [height, width, 3] of PNG or JPEG bytes, or of a file in ``folder``."""
    value = _to_plain_value(value)
    if not isinstance(value, (str, bytes)):
        raise PairError(
            f"{location} = {shorten_value(value)} is no image; write PNG or JPEG bytes (in Parquet)"
            " or a path"
        )
    try:
        return read_image(value, folder)
    except ImageError as error:
        raise PairError(f"{location} = {shorten_value(value)} {error}") from None


def _parse_latent(value: Any, location: str, folder: Path) -> np.ndarray:
    """The elements of a latent, float32 [D], from a tensor or a (nested) list."""
    numbers = value.values if isinstance(value, pa.ListScalar) and value.is_valid else None
    if isinstance(value, pa.FixedShapeTensorScalar) and value.is_valid:
        numbers = pa.array(value.to_numpy().ravel())
    while isinstance(numbers, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)):
        numbers = numbers.flatten()
    if numbers is None or not pa.types.is_floating(numbers.type):
        raise PairError(
            f"{location} = {shorten_value(_to_plain_value(value))} is no latent; write a list or a"
            " fixed-shape tensor of floats"
        )
    with np.errstate(
        over="ignore"
    ):  # too large for float32 becomes infinite, which is rejected below
        elements: np.ndarray = numbers.to_numpy(zero_copy_only=False).astype(np.float32)
    if not np.isfinite(elements).all():
        wrong = np.sum(~np.isfinite(elements))
        raise PairError(
            f"{location}: {wrong} of {elements.size} numbers are not finite; remove the row"
        )
    return elements


def _to_plain_value(value: Any) -> Any:
    if not isinstance(value, pa.Scalar):
        return value
    try:
        return value.as_py()
    except (ValueError, OverflowError, pa.ArrowException):
        return value  # of a type that Python does not have, so neither text nor bytes
