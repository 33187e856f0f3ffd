"""Every answer of every rater: one file that only grows, a JSON object per line, on the disk before
it is acknowledged.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from ebbflow.data.files import read_lines
from ebbflow.labeling.sources import LabelError
from ebbflow.recipe.base import Strict, shorten_value
from ebbflow.storage.disk import raise_if_disk_full, sync_path

logger = logging.getLogger(__name__)


class Answer(Strict):
    """An answer of a rater to a pair, or the withdrawal of the rater's last answer (``undo``).

    Example:
        A line of ``answers.jsonl``, of a rater who prefers picture 1, which was on the left::

            {"at": "2026-01-31T10:00:00.000+00:00", "rater": "Ada", "pair": "17-0",
             "answer": "left", "left": 1, "browser": "9f86d081884c7d65"}
    """

    at: str
    """Time in UTC, ISO 8601."""
    rater: str
    pair: str
    answer: Literal["left", "right", "tie", "undo"]
    left: Literal[0, 1]
    """Which of the pair's pictures was on the left."""
    browser: str = ""
    """Which browser sent it (``server``); only the same one can undo it."""

    @property
    def preferred_picture(self) -> int | None:
        """Which of the pair's pictures the rater prefers; None for a tie."""
        return {"left": self.left, "right": 1 - self.left}.get(self.answer)


class AnswerFile:
    """The file and what stands in it.

    Args:
        path: the file; it is created if there is none. A last line without its end was never
            acknowledged, and is removed.

    Raises:
        LabelError: a line is no answer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _cut_torn_line(path)
        self.standing: list[Answer] = []
        """The answers that were not taken back, in the order in which they came."""
        for answer in _read_answers(path):
            self._apply_answer(answer)

    def append_answer(self, answer: Answer) -> None:
        """Write an answer; when this returns it is on the disk.

        Raises:
            DiskFullError: no space was left; the file is as it was.
        """
        size = self.path.stat().st_size
        with raise_if_disk_full(self.path), self.path.open("ab", buffering=0) as file:
            try:
                line = answer.model_dump_json().encode() + b"\n"
                # A disk that fills up takes a part of the line first, without an error.
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError:
                # The next answer would be appended to the torn line.
                file.truncate(size)
                raise
        self._apply_answer(answer)

    def answers_of_rater(self, rater: str) -> dict[str, Answer]:
        """Return the standing answers of a rater by pair, the last one last."""
        return {answer.pair: answer for answer in self.standing if answer.rater == rater}

    def _apply_answer(self, answer: Answer) -> None:
        if answer.answer != "undo":
            self.standing.append(answer)
        else:
            key = (answer.rater, answer.pair)
            # The file keeps both lines: what a rater took back is part of the record.
            self.standing = [
                standing for standing in self.standing if (standing.rater, standing.pair) != key
            ]


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        path.touch()
        # The name of a new file is on the disk once its folder is.
        sync_path(path.parent)
    content = path.read_bytes()
    length = content.rfind(b"\n") + 1
    if length < len(content):
        os.truncate(path, length)
        logger.warning(
            "%s: removed the last line, which a killed process left without its end", path
        )


def _read_answers(path: Path) -> Iterator[Answer]:
    for location, line in read_lines(path, LabelError):
        try:
            yield Answer.model_validate_json(line)
        except ValidationError:
            raise LabelError(
                f"{location}: {shorten_value(line)} is no answer; restore the file, or remove this"
                " line"
            ) from None
