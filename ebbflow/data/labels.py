"""Labels of people: which of two pictures of a prompt is better, or how good one is.

Three layouts are read: that of Pick-a-Pic (which ``ebbflow label`` writes, a row for each answer),
that of HPD, and files of pairs or of ratings (docs/reward_models.md).
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from ebbflow.data.files import check_file, parse_json_object, read_json_list, read_lines
from ebbflow.data.images import ImageError, read_image
from ebbflow.data.parquet_files import iterate_batches
from ebbflow.data.prompt_files import find_quoted_text
from ebbflow.data.prompts import Prompt
from ebbflow.recipe.base import shorten_value
from ebbflow.storage.disk import sha256_of_file

LABELS = "labels.parquet"
"""The file with all answers in a folder of ``ebbflow label``."""
SUFFIXES = (".parquet", ".jsonl", ".json")
PICK_A_PIC = ("caption", "jpg_0", "jpg_1", "label_0", "label_1")
"""The columns of yuvalkirstain/pickapic_v2 that are read; ``user_id`` and ``has_label`` may be
missing.
"""
RATING = ("prompt", "image", "rating")
PAIR = ("prompt", "chosen", "rejected")


class LabelFileError(ValueError):
    """Labels that cannot be used: names the file, the row, the value and the fix."""


@dataclass(frozen=True)
class Judgement:
    """One answer about two pictures of a prompt.

    Attributes:
        first, second: positions in ``Labels.pictures``.
        preference: 1 where the first picture is better, 0 where the second is, .5 for a tie.
        rater: who answered; empty where the file does not say.
        kind: the column ``kind`` of a pair, such as how a hacked picture was hacked.
    """

    first: int
    second: int
    preference: float
    rater: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Rating:
    """One answer about a picture; larger is better."""

    picture: int
    value: float
    rater: str = ""


@dataclass
class Labels:
    """Pictures, each once, and the answers about them.

    Attributes:
        prompts: the prompt of each picture.
        pictures: PNG or JPEG files.
        digests: sha256 of the files that the labels came from, by path.
    """

    prompts: list[str] = field(default_factory=list)
    pictures: list[bytes] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
    ratings: list[Rating] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    _positions: dict[tuple[str, str], int] = field(default_factory=dict)

    def add_picture(self, prompt: str, content: bytes) -> int:
        """Return the position of a picture, which is added where it is new."""
        key = (prompt, hashlib.sha256(content).hexdigest())
        # A picture of many answers is stored and scored once.
        if key not in self._positions:
            self._positions[key] = len(self.pictures)
            self.prompts.append(prompt)
            self.pictures.append(content)
        return self._positions[key]

    @property
    def digest(self) -> str:
        """sha256 of the contents of all files, wherever they lie."""
        return hashlib.sha256(json.dumps(sorted(self.digests.values())).encode()).hexdigest()

    def decode_pictures(self, positions: Sequence[int]) -> list[np.ndarray]:
        """Return pictures, uint8 RGB [height, width, 3] each.

        Raises:
            LabelFileError: one of them is no picture.
        """
        try:
            return [read_image(self.pictures[position], Path()) for position in positions]
        except ImageError as error:
            raise LabelFileError(f"{', '.join(self.digests)}: a picture {error}") from None

    def build_prompts(self, positions: Sequence[int]) -> list[Prompt]:
        """Return the prompts of pictures; the text in quotes is what an image should spell."""
        return [
            Prompt(position, text, "", find_quoted_text(text), "labels", "train", "{}")
            for position in positions
            for text in [self.prompts[position]]
        ]


def list_label_files(sources: Sequence[str | Path]) -> list[Path]:
    """List the files that sources name: files, and folders of ``ebbflow label`` at any depth.

    Raises:
        LabelFileError: a source does not exist, or has no labels.
    """
    files = []
    for source in map(Path, sources):
        # Sorted: the order of files decides the order of answers, and so the trained weights.
        listed = sorted(source.rglob(LABELS)) if source.is_dir() else [source]
        if not listed:
            raise LabelFileError(
                f"{source}: no {LABELS} in it; answer pairs there with `ebbflow label {source} ...`"
            )
        files += listed
    return files


def read_labels(sources: Sequence[str | Path]) -> Labels:
    """Read all answers of some files and folders. The encoded pictures stay in memory.

    Raises:
        LabelFileError: a file cannot be used, or there is no answer in them.
    """
    labels = Labels()
    for path in list_label_files(sources):
        check_file(path, SUFFIXES, "reward_model.labels", LabelFileError)
        labels.digests[str(path)] = sha256_of_file(path)
        for location, record in _iterate_records(path):
            _find_parser(record, location)(labels, record, location, path.parent)
    # A difference of ratings is no preference of a rater: the two losses have other units.
    if labels.judgements and labels.ratings:
        raise LabelFileError(
            f"{', '.join(labels.digests)}: both comparisons and ratings; train a reward model on"
            " one kind"
        )
    if not labels.judgements and not labels.ratings:
        raise LabelFileError(f"{', '.join(labels.digests)}: no answer in them; label some pairs")
    return labels


Record = dict[str, Any]
Parser = Callable[[Labels, Record, str, Path], None]


def _iterate_records(path: Path) -> Iterator[tuple[str, Record]]:
    if path.suffix.lower() == ".parquet":
        number = 0
        for batch in iterate_batches(path, LabelFileError, None):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    elif path.suffix.lower() == ".json":
        for number, item in enumerate(read_json_list(path, LabelFileError)):
            if not isinstance(item, dict):
                raise LabelFileError(f"{path}, item {number}: {shorten_value(item)} is no object")
            yield f"{path}, item {number}", item
    else:
        for location, line in read_lines(path, LabelFileError):
            if line.strip():
                yield location, parse_json_object(line, location, LabelFileError)


def _find_parser(record: Record, location: str) -> Parser:
    layouts: tuple[tuple[tuple[str, ...], Parser], ...] = (
        (PICK_A_PIC, _add_pick_a_pic),
        (RATING, _add_rating),
        (PAIR, _add_pair),
        (("prompt", "file_path", "human_preference"), _add_hpd),
        (("prompt", "image_path", "human_preference"), _add_hpd),
        (("prompt", "image_path", "rank"), _add_hpd),
    )
    for columns, parser in layouts:
        if set(columns) <= record.keys():
            return parser
    raise LabelFileError(
        f"{location}: the columns {', '.join(record)} are of no known layout; name them as"
        " docs/reward_models.md says"
    )


def _add_pick_a_pic(labels: Labels, record: Record, location: str, folder: Path) -> None:
    # Rows of the published file without an answer, and those of a queue that nobody answered.
    if record.get("has_label") is False or record["label_0"] is None:
        return
    prompt = _parse_text(record["caption"], f"{location}: caption")
    first, second = (
        labels.add_picture(prompt, _read_picture(record[name], f"{location}: {name}", folder))
        for name in ("jpg_0", "jpg_1")
    )
    preference = _parse_number(record["label_0"], f"{location}: label_0")
    if not 0 <= preference <= 1:
        raise LabelFileError(f"{location}: label_0 = {preference} is not within [0, 1]")
    rater = str(record.get("user_id") or "")
    labels.judgements.append(Judgement(first, second, preference, rater))


def _add_pair(labels: Labels, record: Record, location: str, folder: Path) -> None:
    prompt = _parse_text(record["prompt"], f"{location}: prompt")
    chosen, rejected = (
        labels.add_picture(prompt, _read_picture(record[name], f"{location}: {name}", folder))
        for name in ("chosen", "rejected")
    )
    rater = str(record.get("rater") or "")
    kind = str(record.get("kind") or "")
    labels.judgements.append(Judgement(chosen, rejected, 1.0, rater, kind))


def _add_rating(labels: Labels, record: Record, location: str, folder: Path) -> None:
    prompt = _parse_text(record["prompt"], f"{location}: prompt")
    picture = labels.add_picture(
        prompt, _read_picture(record["image"], f"{location}: image", folder)
    )
    value = _parse_number(record["rating"], f"{location}: rating")
    labels.ratings.append(Rating(picture, value, str(record.get("rater") or "")))


def _add_hpd(labels: Labels, record: Record, location: str, folder: Path) -> None:
    """Add every pair of a row of HPD: ``human_preference`` is 1 for the better picture; of ``rank``
    the lowest is the best.
    """
    prompt = _parse_text(record["prompt"], f"{location}: prompt")
    paths = record.get("file_path", record.get("image_path"))
    key = "human_preference" if "human_preference" in record else "rank"
    scores = record[key]
    if not isinstance(paths, list) or not isinstance(scores, list) or len(paths) != len(scores):
        raise LabelFileError(f"{location}: {key} needs a number for each picture")
    values = [_parse_number(score, f"{location}: {key}") for score in scores]
    # The file names pictures by paths; their bytes are kept, so that files may move later.
    pictures = [
        labels.add_picture(prompt, _read_picture(path, f"{location}: pictures", folder))
        for path in paths
    ]
    # A rank counts from the best picture, a preference marks it with 1.
    sign = 1 if key == "human_preference" else -1
    rater = str(record.get("user_hash") or "")
    for one, other in combinations(range(len(pictures)), 2):
        difference = sign * (values[one] - values[other])
        preference = 0.5 + 0.5 * float(np.sign(difference))
        labels.judgements.append(Judgement(pictures[one], pictures[other], preference, rater))


def _read_picture(value: Any, location: str, folder: Path) -> bytes:
    """Return the bytes of a picture, which are the value or in a file that it names."""
    if isinstance(value, dict):  # as Hugging Face's datasets store images
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise LabelFileError(f"{location} = {shorten_value(value)} is no picture; write its bytes")
    # Read once here, so that a missing file is an error with its row and not one in training.
    try:
        read_image(value, folder)
    except ImageError as error:
        raise LabelFileError(f"{location} = {shorten_value(value)} {error}") from None
    return (folder / value).read_bytes()


def _parse_text(value: Any, location: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise LabelFileError(f"{location} = {shorten_value(value)} is no prompt; write one")
    return value.strip()


def _parse_number(value: Any, location: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
        raise LabelFileError(f"{location} = {shorten_value(value)} is no number; correct the row")
    return float(value)


def group_judgements(labels: Labels) -> dict[tuple[int, int], list[float]]:
    """Return the preferences for the first picture of each pair of pictures, one for each answer,
    whichever side the pictures were on.
    """
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    for judgement in labels.judgements:
        pair = (judgement.first, judgement.second)
        # Two raters may have seen the pictures on other sides: count for the lower position.
        if judgement.first < judgement.second:
            groups[pair].append(judgement.preference)
        else:
            groups[pair[::-1]].append(1 - judgement.preference)
    return dict(groups)
