"""What each rater sees next, and when there are enough answers."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ebbflow.labeling.agreement import compute_krippendorff_alpha
from ebbflow.labeling.answers import Answer, AnswerFile
from ebbflow.labeling.sequential import SequentialTest, run_sequential_test
from ebbflow.labeling.sources import LabelError, LabelPair, LabelTask
from ebbflow.recipe.base import sanitize_text
from ebbflow.seeding import derive_seed, permute_indices
from ebbflow.storage.disk import write_text
from ebbflow.storage.locks import LOCK, lock_folder

TASK = "task.json"
ANSWERS = "answers.jsonl"
RATER = re.compile(r"\w[\w .'@-]{0,39}")
"""Names that are harmless in a page, a file and a table."""
Side = Literal["left", "right"]


class OutOfTurnError(Exception):
    """An answer that is not about the pair that the rater sees: another window of the same rater
    was faster.
    """


@dataclass(frozen=True)
class Settings:
    """How pairs are chosen and tested. A folder of answers keeps its settings for good.

    Attributes:
        seed: seed of the choice of pairs, of their order and of their sides.
        max_pairs: number of pairs; if there are more, these are sampled from them.
        error_rate: error rate of the sequential test.
    """

    seed: int = 0
    max_pairs: int = 200
    error_rate: float = 0.05


class Session:
    """The task, the answers so far and what follows from them.

    Args:
        folder: where the answers are. The caller has its lock (``open_session``).
        all_pairs: ask every rater about every pair, also after the test has decided.
    """

    def __init__(
        self, task: LabelTask, folder: Path, settings: Settings, all_pairs: bool = False
    ) -> None:
        self.task = task
        self.folder = folder
        self.settings = settings
        self.all_pairs = all_pairs
        self.pairs = {pair.key: pair for pair in task.pairs}
        self.answers = AnswerFile(folder / ANSWERS)
        # Answers to unknown pairs would be counted for nothing: the file is of another folder, or
        # damaged.
        strange = [answer for answer in self.answers.standing if answer.pair not in self.pairs]
        if strange:
            raise LabelError(
                f"{self.answers.path}: there is no pair {strange[0].pair!r}; restore the file"
            )

    def order_of_pairs(self, rater: str) -> list[str]:
        """Return the keys of all pairs in the order in which the rater sees them."""
        # The order follows from the seed and the rater's name: a restarted server goes on where it
        # stopped.
        keys = list(self.pairs)
        if self.task.is_ordered:
            return keys
        return [
            keys[index]
            for index in permute_indices(len(keys), derive_seed(self.settings.seed, "order", rater))
        ]

    def picture_on_left(self, rater: str, pair: str) -> Literal[0, 1]:
        """Return which of the pair's pictures the rater sees on the left."""
        # By rater and pair, so that a side says nothing about the policy, and a restarted server
        # shows the same page.
        return 1 if derive_seed(self.settings.seed, "left", rater, pair) & 1 else 0

    def picture_on_side(self, rater: str, pair: str, side: Side) -> bytes:
        """Return the PNG on a side.

        Raises:
            KeyError: there is no such pair.
        """
        left = self.picture_on_left(rater, pair)
        return self.pairs[pair].pictures[left if side == "left" else 1 - left].png

    def list_upcoming_pairs(self, rater: str) -> list[LabelPair]:
        """Return the pairs that the rater is still asked about, the next one first; none after the
        test has decided.
        """
        if self.is_decided():
            return []
        answered = self.answers.answers_of_rater(rater)
        return [self.pairs[key] for key in self.order_of_pairs(rater) if key not in answered]

    def record_answer(
        self, rater: str, pair: str, answer: Literal["left", "right", "tie"], browser: str = ""
    ) -> None:
        """Keep an answer to the pair that the rater sees.

        Args:
            browser: what tells the rater's browser from others.

        Raises:
            OutOfTurnError: the rater sees another pair.
            DiskFullError: it could not be written.
        """
        # The page may be old: two windows of one rater, or a test that another rater's answer has
        # decided meanwhile.
        upcoming = self.list_upcoming_pairs(rater)
        if not upcoming or upcoming[0].key != pair:
            raise OutOfTurnError(f"{rater} does not see pair {pair} any more")
        self._append_answer(rater, pair, answer, browser)

    def undo_last_answer(self, rater: str, browser: str = "") -> None:
        """Take back the rater's last answer, so that its pair is the next one that the rater sees.

        Raises:
            OutOfTurnError: there is no answer, another browser gave it, or the test has decided: a
                decision is final.
            DiskFullError: it could not be written.
        """
        if self.is_decided():
            raise OutOfTurnError("the test has decided")
        answered = self.answers.answers_of_rater(rater)
        if not answered:
            raise OutOfTurnError(f"{rater} has no answer to take back")
        last = list(answered.values())[-1]
        # A rater's name is no secret, so it does not say who asks.
        if last.browser != browser:
            raise OutOfTurnError(f"the last answer of {rater} was given in another browser")
        self._append_answer(rater, last.pair, "undo", browser)

    def _append_answer(
        self, rater: str, pair: str, answer: Literal["left", "right", "tie", "undo"], browser: str
    ) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        left = self.picture_on_left(rater, pair)
        self.answers.append_answer(
            Answer(at=now, rater=rater, pair=pair, answer=answer, left=left, browser=browser)
        )

    def group_answers_by_pair(self) -> dict[str, list[Answer]]:
        """Return the standing answers of every pair that has one, in the order in which they
        came.
        """
        answers_by_pair: dict[str, list[Answer]] = defaultdict(list)
        for answer in self.answers.standing:
            answers_by_pair[answer.pair].append(answer)
        return dict(answers_by_pair)

    def run_test(self) -> SequentialTest | None:
        """Run the sequential test of a comparison; None for pairs of one policy."""
        if self.task.kind != "comparison":
            return None
        # Answers on one pair are not independent, so only the first on each pair counts.
        preferred = [
            answers[0].preferred_picture for answers in self.group_answers_by_pair().values()
        ]
        return run_sequential_test(
            # Picture 1 is the candidate's; None is a tie.
            [picture == 1 for picture in preferred if picture is not None],
            self.settings.error_rate,
        )

    def is_decided(self) -> bool:
        """Return whether nobody is asked any more because the test has decided."""
        test = None if self.all_pairs else self.run_test()
        return test is not None and test.decided_after is not None

    def measure_agreement(self) -> float | None:
        """Return Krippendorff's alpha of preferences (first picture, second picture, tie) over all
        raters.
        """
        return compute_krippendorff_alpha(
            [
                [answer.preferred_picture for answer in answers]
                for answers in self.group_answers_by_pair().values()
            ]
        )


def normalize_rater_name(text: str) -> str:
    """Return a rater's name in one spelling.

    Raises:
        ValueError: it is no name.
    """
    # "é" has two spellings in Unicode; without NFC one rater could count as two.
    name = " ".join(unicodedata.normalize("NFC", text).split())
    if not RATER.fullmatch(name):
        raise ValueError(
            "a name has 1 to 40 letters, digits, spaces or . ' @ -, and starts with a letter or"
            " digit"
        )
    return name


@contextmanager
def open_session(
    task: LabelTask, folder: Path, settings: Settings, all_pairs: bool = False
) -> Iterator[Session]:
    """Open the session of a folder, which is new or has answers to the same task. The folder is
    locked until the context ends.

    Raises:
        LabelError: the folder has something else in it, or answers to another task.
        FolderInUseError: another process has it.
    """
    _require_label_folder(folder)
    with lock_folder(folder):
        # Under the lock, as two servers could otherwise both find a new folder.
        _require_same_task(folder / TASK, _describe_task(task, settings))
        yield Session(task, folder, settings, all_pairs)


def _require_label_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise LabelError(f"{folder} is a file; name a folder for the answers")
    if (
        folder.is_dir()
        and not (folder / TASK).exists()
        and any(map(_is_foreign_file, folder.iterdir()))
    ):
        raise LabelError(
            f"{folder} has other files in it; name a new folder for the answers, or one that has"
            " some"
        )


def _is_foreign_file(path: Path) -> bool:
    """Return whether a file is not one that a process leaves which was killed as it began."""
    return path.name != LOCK and not path.name.startswith(f".{TASK}.partial-")


def _describe_task(task: LabelTask, settings: Settings) -> dict[str, Any]:
    return {
        "kind": task.kind,
        "policies": list(task.names),
        **vars(settings),
        "sha256": task.file_digests,
        "pairs": [pair.key for pair in task.pairs],
    }


def _require_same_task(path: Path, described: dict[str, Any]) -> None:
    """Write what the answers are about into a new folder; in one with answers, check that they are
    about the same pictures and settings.
    """
    if not path.exists():
        write_text(path, json.dumps(described, indent=2) + "\n")
        return
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        recorded = None
    if not isinstance(recorded, dict):
        raise LabelError(f"{path} is damaged; name a new folder for the answers")
    differing_keys = [key for key, value in described.items() if recorded.get(key) != value]
    # A folder keeps its seed and its pictures: other ones would change which pair an answer is
    # about.
    if differing_keys:
        # Digests and lists of pairs tell a reader nothing.
        differences = ", ".join(
            f"{key} = {sanitize_text(str(recorded.get(key)), 80)}"
            for key in differing_keys
            if key not in ("sha256", "pairs")
        )
        raise LabelError(
            f"{path.parent} has answers to something else ({differences or 'other pictures'});"
            " repeat the command that made it, or name a new folder"
        )
