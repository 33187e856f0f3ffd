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
from ebbflow.data.parquet_files import iterate_batches
from ebbflow.recipe.base import explain_lone_surrogate, sanitize_text, shorten_value

IMAGES = ("chosen", "rejected")
LATENTS = ("chosen_latent", "rejected_latent")


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

    Example:
        >>> Pair(
        ...     number=0,
        ...     location="pairs.jsonl, line 1",
        ...     prompt="a red cube",
        ...     columns=("chosen", "rejected"),
        ...     chosen=np.zeros((512, 512, 3), np.uint8),
        ...     rejected=np.ones((512, 512, 3), np.uint8),
        ... )
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
        parse = _parse_image if columns == IMAGES else _parse_latent
        chosen, rejected = (
            parse(record[column], f"{location}: {column}", path.parent) for column in columns
        )
        prompt = _parse_prompt(record["prompt"], location)
        yield Pair(number, location, prompt, columns, chosen, rejected)


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
    if path.suffix.lower() == ".parquet":
        rows = _iterate_parquet_records(path, ignored, prompts_only)
    else:
        rows = _iterate_jsonl_records(path, ignored)
    # An empty file leaves the number at -1; the readers are generators, which have no length.
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
        # The prompts of all pairs are read in a pass of their own, without gigabytes of images.
        for batch in iterate_batches(path, PairError, ["prompt"] if prompts_only else used):
            for row in range(len(batch)):
                number += 1
                # Arrow's scalars: as a Python list, a latent would take many times its bytes.
                record = {name: batch[name][row] for name in batch.schema.names}
                yield f"{path}, row {number}", record
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
        # Files that were joined have byte order marks in the middle.
        text = line.removeprefix("\ufeff").strip()
        if not text:
            continue
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
    # A list, because two columns of one name are found below.
    names = list(names)
    listed = sanitize_text(", ".join(names), 300)
    if "prompt" not in names:
        raise PairError(
            f"{location}: no column 'prompt' among {listed}; name the columns as datasets/README.md"
            " says"
        )
    complete_sides = [sides for sides in (IMAGES, LATENTS) if set(sides) <= set(names)]
    if not complete_sides:
        needed = " or ".join(" and ".join(sides) for sides in (IMAGES, LATENTS))
        raise PairError(
            f"{location}: a pair needs {needed}, and there is {listed}; rename the columns"
        )
    if len(complete_sides) > 1:
        raise PairError(
            f"{location}: both images and latents; remove {' and '.join(IMAGES)} to train on the"
            " latents"
        )
    (sides,) = complete_sides
    duplicate_columns = [name for name in ("prompt", *sides) if names.count(name) > 1]
    if duplicate_columns:
        raise PairError(
            f"{location}: the column {duplicate_columns[0]!r} is there twice; rename one"
        )
    return sides


# Records to prompts, images and latents. Values are Arrow scalars, or what JSON held.


def _parse_prompt(value: Any, location: str) -> str:
    value = _to_plain_value(value)
    if not isinstance(value, str) or not value.strip():
        raise PairError(
            f"{location}: {shorten_value(value)} is no prompt; give every row a 'prompt' that is"
            " not empty"
        )
    # JSON can hold half a character, "\\ud800", which neither Arrow nor a tokenizer can encode.
    reason = explain_lone_surrogate(value)
    if reason:
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
    # Down to the array of numbers, whatever lists are around it: [C, H, W] is flattened in C order,
    # as latents are stored.
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
    # What is too large for float32 becomes infinite, which is rejected below.
    with np.errstate(over="ignore"):
        elements: np.ndarray = numbers.to_numpy(zero_copy_only=False).astype(np.float32)
    num_not_finite = np.sum(~np.isfinite(elements))
    if num_not_finite:
        raise PairError(
            f"{location}: {num_not_finite} of {elements.size} numbers are not finite; remove the"
            " row"
        )
    return elements


def _to_plain_value(value: Any) -> Any:
    if not isinstance(value, pa.Scalar):
        return value
    try:
        return value.as_py()
    except (ValueError, OverflowError, pa.ArrowException):
        # Of a type that Python does not have, such as a date in year 10,000: neither text nor
        # bytes, and so rejected by the callers.
        return value
