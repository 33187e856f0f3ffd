"""Files of preference pairs: a prompt with a chosen and a rejected image or latent, read in streams and checked row by row.

The format is in ``datasets/README.md``.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from ebbflow.data.condition import check_picture
from ebbflow.recipe.base import printable, short

IMAGES = ("chosen", "rejected")
LATENTS = ("chosen_latent", "rejected_latent")
ROWS_AT_ONCE = 16
"""Of a Parquet file; what a row holds can be megabytes."""


class PairError(ValueError):
    """Preference pairs that cannot be used: names the file, the row or line, the value and the way out."""


@dataclass(frozen=True)
class Pair:
    """One row of a pairs file.

    Attributes:
        number: of the row in the file, from zero.
        place: the row, for error messages.
        columns: ``IMAGES`` or ``LATENTS``: what the two sides are and where they stood.
        chosen: an image, uint8 RGB [height, width, 3], or the elements of a latent, finite float32 [D].
        rejected: the same.
    """

    number: int
    place: str
    prompt: str
    columns: tuple[str, str]
    chosen: np.ndarray
    rejected: np.ndarray

    @property
    def tie(self) -> bool:
        """Nothing tells the sides apart, so nothing can be learnt from them."""
        return np.array_equal(self.chosen, self.rejected)


def read_pairs(path: Path) -> Iterator[Pair]:
    """Every pair of a file with its images or latents; memory is bounded by a few rows.

    Raises:
        PairError: the file or a row cannot be used.
    """
    for number, place, record in _records(path, set()):
        columns = IMAGES if IMAGES[0] in record else LATENTS
        read = _image if columns == IMAGES else _latent
        chosen, rejected = (read(record[column], f"{place}: {column}", path.parent) for column in columns)
        yield Pair(number, place, _prompt(record["prompt"], place), columns, chosen, rejected)


def read_pair_prompts(path: Path, ignored: set[str]) -> Iterator[tuple[int, str]]:
    """Number and prompt of every pair; reads no image and no latent.

    Args:
        ignored: gets the names of the columns that no pair is made of.

    Raises:
        PairError: the file, its columns or a prompt cannot be used.
    """
    for number, place, record in _records(path, ignored, prompts_only=True):
        yield number, _prompt(record["prompt"], place)


def check_pairs(path: Path) -> None:
    """Check the file, its columns and its first row.

    Raises:
        PairError: one of them cannot be used.
    """
    next(read_pairs(path))


# From here on: files to records. A record is a row's columns by name; its place is for error messages.

Record = dict[str, Any]


def _records(path: Path, ignored: set[str], prompts_only: bool = False) -> Iterator[tuple[int, str, Record]]:
    if path.suffix.lower() not in (".parquet", ".jsonl"):
        raise PairError(f"{path}: its suffix {path.suffix!r} is neither .parquet nor .jsonl; convert or rename it")
    if not os.path.isfile(path):  # no error of its own for a name that no file can have
        raise PairError(f"{path}: no such file; check the stage's 'pairs'")
    rows = _parquet(path, ignored, prompts_only) if path.suffix.lower() == ".parquet" else _jsonl(path, ignored)
    number = -1
    for number, (place, record) in enumerate(rows):
        yield number, place, record
    if number < 0:
        raise PairError(f"{path}: there is no pair in it; write at least one")


def _parquet(path: Path, ignored: set[str], prompts_only: bool) -> Iterator[tuple[str, Record]]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            used = ["prompt", *_sides(names, str(path))]
            ignored.update(set(names).difference(used))
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=["prompt"] if prompts_only else used):
                for row in range(len(batch)):
                    number += 1
                    yield f"{path}, row {number}", {name: batch[name][row] for name in batch.schema.names}
    except PairError:
        raise
    except Exception as error:  # what is damaged can look like anything: Arrow has a dozen errors, memory and text their own
        reason = printable(str(error).partition("\n")[0] or type(error).__name__, 300)
        raise PairError(f"{path}: not a Parquet file that can be read, after row {number} ({reason}); write it again") from None


def _jsonl(path: Path, ignored: set[str]) -> Iterator[tuple[str, Record]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                place = f"{path}, line {number}"
                if text := line.removeprefix(b"\xef\xbb\xbf").strip():
                    record = _object(text, place)
                    if _sides(record, place) == LATENTS:
                        raise PairError(f"{place}: latents are read from Parquet alone; write the pairs as a .parquet file")
                    ignored.update(record.keys() - {"prompt", *IMAGES})
                    yield place, record
    except OSError as error:
        raise PairError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None


def _object(line: bytes, place: str) -> Record:
    try:
        record = json.loads(line.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise PairError(f"{place}: {short(line)} is not JSON ({error}); write one JSON object a line, in UTF-8") from None
    if not isinstance(record, dict):
        raise PairError(f'{place}: {short(record)} is no object; write {{"prompt": ..., "chosen": ..., "rejected": ...}}')
    return record


def _unique_keys(pairs: list[tuple[str, Any]]) -> Record:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("a key is there twice")
    return record


def _joined(names: list[str]) -> str:
    return printable(", ".join(names), 300)


def _sides(names: Iterable[str], place: str) -> tuple[str, str]:
    """The two columns that make a pair."""
    names = list(names)
    if "prompt" not in names:
        raise PairError(f"{place}: no column 'prompt' among {_joined(names)}; name the columns as datasets/README.md says")
    there = [sides for sides in (IMAGES, LATENTS) if set(sides) <= set(names)]
    if not there:
        raise PairError(
            f"{place}: a pair needs {' and '.join(IMAGES)} (images) or {' and '.join(LATENTS)}, and there is {_joined(names)}; "
            "rename the columns"
        )
    if len(there) > 1:
        raise PairError(f"{place}: images and latents of the same pair; leave out {' and '.join(IMAGES)} to train on the latents")
    if twice := [name for name in ("prompt", *there[0]) if names.count(name) > 1]:
        raise PairError(f"{place}: the column {twice[0]!r} is there twice; rename one")
    return there[0]


# Records to prompts, images and latents. Values are Arrow scalars, or what JSON held.


def _prompt(value: Any, place: str) -> str:
    value = _plain(value)
    if not isinstance(value, str) or not value.strip():
        raise PairError(f"{place}: {short(value)} is no prompt; give every row a 'prompt' that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PairError(f"{place}: prompt = {short(value)} holds half of a surrogate pair; escape characters whole") from None
    return value.strip()


def _image(value: Any, place: str, folder: Path) -> np.ndarray:
    """uint8 RGB [height, width, 3] of PNG or JPEG bytes, or of a file in ``folder``."""
    value = _plain(value)
    if isinstance(value, str):
        source: io.BytesIO | Path = _inside(value, place, folder)
    elif isinstance(value, bytes):
        source = io.BytesIO(value)
    else:
        raise PairError(f"{place} = {short(value)} is no image; write PNG or JPEG bytes (in Parquet) or a path")
    try:
        with Image.open(source, formats=("PNG", "JPEG")) as image:
            check_picture(image)
            return np.asarray(image.convert("RGB"))
    except Exception as error:  # of many kinds: every decoder of Pillow has its own
        raise PairError(
            f"{place} = {short(value)} is no PNG or JPEG that can be read ({printable(str(error), 200)}); write it again"
        ) from None


def _inside(value: str, place: str, folder: Path) -> Path:
    path = PurePath(value)
    if path.is_absolute() or ".." in path.parts or _links_out(folder / path, folder):
        raise PairError(
            f"{place} = {short(value)} leaves the folder of the pairs file; keep images below it and name them from there"
        )
    if not os.path.isfile(folder / path):
        raise PairError(
            f"{place} = {short(value)}: there is no such image in {folder}. Paths are relative to the pairs file; of pairs at a "
            "URI only the file itself is fetched: put the bytes of the images into Parquet there"
        )
    return folder / path


def _links_out(path: Path, folder: Path) -> bool:
    try:
        return not path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError):  # no path at all: said when it is opened
        return False


def _latent(value: Any, place: str, folder: Path) -> np.ndarray:
    """The elements of a latent, float32 [D], from a tensor or a (nested) list."""
    numbers = value.values if isinstance(value, pa.ListScalar) and value.is_valid else None
    if isinstance(value, pa.FixedShapeTensorScalar) and value.is_valid:
        numbers = pa.array(value.to_numpy().ravel())
    while isinstance(numbers, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)):
        numbers = numbers.flatten()
    if numbers is None or not pa.types.is_floating(numbers.type):
        raise PairError(f"{place} = {short(_plain(value))} is no latent; write a list or a fixed-shape tensor of floats")
    with np.errstate(over="ignore"):  # too large for float32 is infinite, which is refused below
        elements = numbers.to_numpy(zero_copy_only=False).astype(np.float32)
    if not np.isfinite(elements).all():
        raise PairError(f"{place}: {np.sum(~np.isfinite(elements))} of {elements.size} numbers are not finite; leave the row out")
    return elements


def _plain(value: Any) -> Any:
    if not isinstance(value, pa.Scalar):
        return value
    try:
        return value.as_py()
    except (ValueError, OverflowError, pa.ArrowException):
        return value  # of no kind that Python has, so neither text nor bytes
