"""``dpg``: DPG-Bench's score (2403.05135), with a vision-language model behind a server that
answers its questions.

The prompt file is ``dpg_bench.csv``, whose questions about a prompt are its metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from ebbflow.rewards.chat import (
    ChatServerConfig,
    ImageChatReward,
    ask_about_images,
    parse_answer,
    parse_yes_or_no,
)
from ebbflow.rewards.http import NoAnswer

if TYPE_CHECKING:
    import numpy as np

    from ebbflow.data.prompts import Prompt
    from ebbflow.rewards.base import Reward

NO_QUESTIONS = "the prompt has no questions of DPG-Bench; take the prompts of its dpg_bench.csv"
INSTRUCTION = ' Answer "yes" or "no".'
"""After each question: the published model, mPLUG, answers in one word without being asked to."""
MAX_TOKENS = 8


class DpgConfig(ChatServerConfig):
    """Share of DPG-Bench's questions about the image to which a model behind a server says yes
    (2403.05135), 0 to 1.
    """

    known_lowest: ClassVar[float | None] = 0.0
    name: Literal["dpg"] = "dpg"

    def explain_unscorable(self, prompt: Prompt) -> str | None:
        try:
            read_questions(prompt.metadata)
        except NoAnswer as error:
            return str(error)
        return None

    def build(self) -> Reward:
        return Dpg(self)


class Question(NamedTuple):
    """A question about a prompt, and the numbers of those on which it depends.

    Example:
        Whether the dog is brown can only be asked where there is a dog::

            Question(1, (), "Is there a dog?")
            Question(2, (1,), "Is the dog brown?")
    """

    number: int
    depends_on: tuple[int, ...]
    text: str


class Dpg(ImageChatReward):
    """The published share of one image; NaN with a reason where an answer is neither yes nor no."""

    config: DpgConfig

    def judge_image(self, image: np.ndarray, prompt: Prompt) -> list[float]:
        questions = read_questions(prompt.metadata)
        # All are asked, as published, although the answer to one may make another worthless.
        answers = {
            question.number: self._answer_question(image, question) for question in questions
        }
        return [compute_dpg_score(questions, answers)]

    def _answer_question(self, image: np.ndarray, question: Question) -> float:
        choice = ask_about_images(
            self.config, [image], question.text + INSTRUCTION, MAX_TOKENS, sleep=self.sleep
        )
        return parse_answer(
            self.config, choice, parse_yes_or_no, "the whole answer must be yes or no"
        )


def compute_dpg_score(questions: Sequence[Question], answers: Mapping[int, float]) -> float:
    """Return the mean of the answers, 0 or 1 by number, where a question counts 0 if one that it
    depends on does.

    In the order of the file, as in ``compute_dpg_bench.py`` of TencentQQGYLab/ELLA.
    """
    scores = dict(answers)
    # In one pass: a question that a later one sets to 0 is not looked at again, as published.
    for question in questions:
        if any(scores[number] == 0 for number in question.depends_on):
            scores[question.number] = 0.0
    return sum(scores.values()) / len(scores)


def read_questions(metadata: str) -> list[Question]:
    """Read the questions in the further columns of a prompt (``ebbflow.data.prompt_files``).

    Raises:
        NoAnswer: there are none, or one of them cannot be used.
    """
    try:
        rows = json.loads(metadata).get("questions") or []
        questions = []
        for row in rows:
            # "1,3", or 0 for a question that depends on none.
            dependencies = [int(number) for number in str(row["dependency"]).split(",")]
            questions.append(
                Question(
                    number=int(row["proposition_id"]),
                    depends_on=tuple(number for number in dependencies if number != 0),
                    text=str(row["question_natural_language"]),
                )
            )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise NoAnswer(NO_QUESTIONS) from None
    numbers = {question.number for question in questions}
    if len(numbers) < len(questions):
        raise NoAnswer(
            "two questions of the prompt have the same proposition_id; take the published"
            " dpg_bench.csv"
        )
    missing = [
        number for question in questions for number in question.depends_on if number not in numbers
    ]
    if missing:
        raise NoAnswer(
            f"a question of the prompt depends on question {missing[0]}, which is not there; take"
            " the published file"
        )
    if not questions:
        raise NoAnswer(NO_QUESTIONS)
    return questions
