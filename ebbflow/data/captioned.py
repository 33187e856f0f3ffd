"""Pictures with captions that somebody else made: a folder of images or videos, or Parquet of
images, read row by row and checked.

The format is in ``datasets/README.md``: that of Hugging Face's ``imagefolder`` and
``videofolder``, or a text file beside each picture.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ebbflow.data.clips import VIDEO_SUFFIXES, read_clip
from ebbflow.data.files import check_file, parse_json_object, read_lines, shorten_library_error
from ebbflow.data.images import ImageError, read_image
from ebbflow.data.parquet_files import iterate_batches
from ebbflow.recipe.base import explain_lone_surrogate, sanitize_text, shorten_value
from ebbflow.storage.disk import PathError, resolve_inside, sha256_of_file
from ebbflow.storage.tables import count_rows

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP")
METADATA_FILES = ("metadata.jsonl", "metadata.csv")
CAPTION_COLUMNS = ("caption", "text", "prompt")
"""Of these columns a row has one; the first that is there counts."""
FILE_COLUMN = "file_name"
IMAGE_COLUMN = "image"


class DataError(ValueError):
    """Captioned pictures that cannot be used: names the file or row, the value and the fix."""


@dataclass(frozen=True)
class CaptionedPicture:
    """One row of a data set, with its picture still unread.

    Example:
        >>> CaptionedPicture(
        ...     number=0,
        ...     location="photos/cat.png",
        ...     caption="a cat on a wall",
        ...     source=Path("photos/cat.png"),
        ... )

    Attributes:
        number: of the row, from zero.
        location: the file, or the Parquet file and its row, for error messages.
        source: the file, or the bytes of an image.
    """

    number: int
    location: str
    caption: str
    source: Path | bytes

    @property
    def is_video(self) -> bool:
        return isinstance(self.source, Path) and self.source.suffix.lower() in VIDEO_SUFFIXES

    def digest(self) -> str:
        """Return the sha256 of the picture's file or bytes."""
        if isinstance(self.source, bytes):
            return hashlib.sha256(self.source).hexdigest()
        return sha256_of_file(self.source)

    def read(self, frames: int, rate: float) -> np.ndarray | None:
        """Read the picture as a model with so many frames takes it.

        Args:
            frames: 1 for a model of images, which takes the first frame of a video.
            rate: frames a second, of a video.

        Returns:
            uint8 RGB [height, width, 3], of a model of videos [frames, height, width, 3]; None for
            a video that is too short, and for an image where frames are wanted.

        Raises:
            DataError: the picture cannot be read; names the file.
        """
        try:
            if isinstance(self.source, Path) and self.is_video:
                clip = read_clip(self.source, frames, rate)
                return clip if clip is None or frames > 1 else clip[0]
            if frames > 1:
                return None
            folder = self.source.parent if isinstance(self.source, Path) else Path()
            value = self.source if isinstance(self.source, bytes) else self.source.name
            return read_image(value, folder, IMAGE_FORMATS, upright=True)
        except ImageError as error:
            raise DataError(f"{self.location} {error}") from None


def read_captioned(path: Path) -> Iterator[CaptionedPicture]:
    """Iterate over the rows of a folder or a Parquet file, in an order that depends on their names
    alone; no picture is decoded.

    Raises:
        DataError: the data or a row cannot be used, or there is none.
    """
    number = -1
    for number, (location, caption, source) in enumerate(_iterate_rows(path)):
        yield CaptionedPicture(number, location, _parse_caption(caption, location), source)
    if number < 0:
        raise DataError(
            f"{path}: no picture with a caption in it; add {', '.join(IMAGE_SUFFIXES)} files with"
            " captions (datasets/README.md)"
        )


def count_captioned(path: Path) -> int:
    """Count the rows of ``read_captioned``; of Parquet without reading its images.

    Raises:
        DataError: the data cannot be used.
    """
    tables = _find_tables(path)
    if tables:
        return sum(count_rows(table) for table in tables)
    return sum(1 for _ in _iterate_rows(path))


def list_unlisted_files(path: Path) -> list[Path]:
    """List the pictures of a folder that its metadata file does not name."""
    metadata = _find_metadata_file(path) if path.is_dir() else None
    if metadata is None:
        return []
    listed = {source.resolve() for _, _, source in _iterate_metadata_rows(metadata)}
    return [file for file in _list_pictures(path) if file.resolve() not in listed]


def _iterate_rows(path: Path) -> Iterator[tuple[str, Any, Path | bytes]]:
    """Iterate over (location, caption as it stands there, picture)."""
    tables = _find_tables(path)
    if tables:
        for table in tables:
            yield from _iterate_parquet_rows(table)
        return
    metadata = _find_metadata_file(path)
    if metadata is not None:
        yield from _iterate_metadata_rows(metadata)
        return
    for picture in _list_pictures(path):
        yield str(picture), _read_caption_file(picture), picture


def _find_tables(path: Path) -> list[Path]:
    """Find the Parquet files that the rows are in; none where the pictures are files."""
    if not path.is_dir():
        check_file(path, (".parquet",), "the key 'data.path'", DataError)
        return [path]
    if _find_metadata_file(path) is not None or _list_pictures(path):
        return []
    return sorted(path.glob("*.parquet"))


def _find_metadata_file(folder: Path) -> Path | None:
    found = [folder / name for name in METADATA_FILES if (folder / name).is_file()]
    if len(found) > 1:
        raise DataError(f"{folder}: has {' and '.join(METADATA_FILES)}; remove one of them")
    return found[0] if found else None


def _list_pictures(folder: Path) -> list[Path]:
    suffixes = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES)
    return sorted(
        file for file in folder.rglob("*") if file.suffix.lower() in suffixes and file.is_file()
    )


def _read_caption_file(picture: Path) -> str:
    file = picture.with_suffix(".txt")
    if not file.is_file():
        raise DataError(
            f"{picture}: has no caption; write {file.name} beside it, or a row for each picture in"
            f" {METADATA_FILES[0]}"
        )
    return "".join(text for _, text in read_lines(file, DataError))


def _iterate_metadata_rows(metadata: Path) -> Iterator[tuple[str, Any, Path]]:
    records = _iterate_csv_records if metadata.suffix == ".csv" else _iterate_jsonl_records
    for location, record in records(metadata):
        column = _find_caption_column(record, location)
        name = record.get(FILE_COLUMN)
        if not isinstance(name, str) or not name.strip():
            raise DataError(
                f"{location}: {FILE_COLUMN} = {shorten_value(name)} is no file; give the path of"
                " the picture, relative to the folder"
            )
        yield f"{metadata.parent / name}", record[column], _find_file(metadata, name, location)


def _find_file(metadata: Path, name: str, location: str) -> Path:
    try:
        file = resolve_inside(metadata.parent, name)
    except PathError:
        raise DataError(
            f"{location}: {FILE_COLUMN} = {shorten_value(name)} lies outside {metadata.parent};"
            " move it there"
        ) from None
    if not file.is_file():
        raise DataError(
            f"{location}: {FILE_COLUMN} = {shorten_value(name)} is not in {metadata.parent}; add"
            " the file, or remove the row"
        )
    return file


def _iterate_jsonl_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for location, line in read_lines(path, DataError):
        if line.strip():
            yield location, parse_json_object(line, location, DataError)


def _iterate_csv_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.DictReader((line for _, line in read_lines(path, DataError)), strict=True)
    try:
        for record in reader:
            yield f"{path}, line {reader.line_num}", record
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num}: not CSV ({error}); quote fields that hold commas or"
            " quotes, double these"
        ) from None


def _iterate_parquet_rows(path: Path) -> Iterator[tuple[str, Any, bytes]]:
    number = 0
    try:
        for batch in iterate_batches(path, DataError):
            names = batch.schema.names
            column = _find_caption_column(names, str(path))
            if IMAGE_COLUMN not in names:
                listed = sanitize_text(", ".join(names), 300)
                raise DataError(
                    f"{path}: no column {IMAGE_COLUMN!r} among {listed}; name the column of the"
                    " images' bytes so"
                )
            captions = batch[column].to_pylist()
            for caption, value in zip(captions, batch[IMAGE_COLUMN].to_pylist(), strict=True):
                number += 1
                location = f"{path}, row {number}"
                # Hugging Face writes images as {"bytes": ..., "path": ...}.
                content = value.get("bytes") if isinstance(value, dict) else value
                if not isinstance(content, bytes):
                    raise DataError(
                        f"{location}: {IMAGE_COLUMN} = {shorten_value(value)} is no image; write"
                        " the bytes of an image file"
                    )
                yield location, caption, content
    except DataError:
        raise
    except Exception as error:
        # Arrow, memory and text each raise errors of their own at a damaged file: no common base.
        reason = shorten_library_error(error)
        raise DataError(
            f"{path}: not a Parquet file that can be read, after row {number} ({reason}); write it"
            " again"
        ) from None


def _find_caption_column(names: Collection[str], location: str) -> str:
    columns = [name for name in CAPTION_COLUMNS if name in names]
    if not columns:
        listed = sanitize_text(", ".join(map(str, names)), 300)
        raise DataError(
            f"{location}: no column {', '.join(map(repr, CAPTION_COLUMNS))} among {listed}; name"
            " the column of the captions so"
        )
    return columns[0]


def _parse_caption(value: Any, location: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"{location}: {shorten_value(value)} is no caption; give every picture one that is not"
            " empty"
        )
    # JSON can hold half a character, "\\ud800", which neither Arrow nor a tokenizer can encode.
    reason = explain_lone_surrogate(value)
    if reason:
        raise DataError(f"{location}: caption = {shorten_value(value)} {reason}")
    return value.strip()
