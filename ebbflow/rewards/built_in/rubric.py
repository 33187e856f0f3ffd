"""``rubric``: weighted questions about each prompt's image, which a vision-language model behind a
server answers with yes or no.

The questions are the column ``rubric`` of the prompt file. ``ebbflow write-rubrics`` has a language
model write them (``ebbflow.rewards.rubric_files``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from ebbflow.rewards.chat import (
    ChatServerConfig,
    ImageChatReward,
    ask_about_images,
    compute_word_probability,
    parse_answer,
    parse_yes_or_no,
)
from ebbflow.rewards.http import NoAnswer

if TYPE_CHECKING:
    import numpy as np

    from ebbflow.data.prompts import Prompt
    from ebbflow.rewards.base import Reward

COLUMN = "rubric"
NO_RUBRIC = (
    f"the prompt has no column {COLUMN!r} with a list of questions; write them with `ebbflow"
    " write-rubrics`, or by hand (docs/rewards.md)"
)
INSTRUCTION = ' Answer "yes" or "no".'
MAX_TOKENS = {"probability": 1, "yes_no": 8}
MAX_UNREADABLE = 0.5
"""Share of the weight of a rubric whose answers may be unreadable before the image fails."""


class RubricConfig(ChatServerConfig):
    """Weighted share of a prompt's own questions about the image to which a model behind a server
    says yes, 0 to 1.
    """

    known_lowest: ClassVar[float | None] = 0.0
    name: Literal["rubric"] = "rubric"
    answer: Literal["probability", "yes_no"] = "probability"
    """``probability``: P(yes) / (P(yes) + P(no)) of the first token counts as that share of a yes.
    ``yes_no``: 1 or 0."""

    def explain_unscorable(self, prompt: Prompt) -> str | None:
        try:
            read_rubric(prompt.metadata)
        except NoAnswer as error:
            return str(error)
        return None

    def build(self) -> Reward:
        return Rubric(self)


class Criterion(NamedTuple):
    """A question of a rubric, and how much it counts."""

    question: str
    weight: float = 1.0


class Rubric(ImageChatReward):
    """sum_i w_i a_i / sum_i w_i over the questions whose answers a_i can be read; NaN where they
    have less than half of the weight. The metric ``rubric_unreadable`` is the share of the weight
    without an answer.
    """

    config: RubricConfig

    def list_metric_names(self) -> Sequence[str]:
        return ("unreadable",)

    def judge_image(self, image: np.ndarray, prompt: Prompt) -> list[float]:
        rubric = read_rubric(prompt.metadata)
        answers: list[tuple[float, float]] = []
        # One unreadable answer costs its question, not the image.
        reason = ""
        for criterion in rubric:
            try:
                answers.append((criterion.weight, self._answer_question(image, criterion)))
            except NoAnswer as error:
                reason = str(error)
        score, unreadable = compute_rubric_score(rubric, answers)
        if score is None:
            raise NoAnswer(f"{unreadable:.0%} of the rubric has no readable answer: {reason}")
        return [score, unreadable]

    def _answer_question(self, image: np.ndarray, criterion: Criterion) -> float:
        wants_probability = self.config.answer == "probability"
        choice = ask_about_images(
            self.config,
            [image],
            criterion.question + INSTRUCTION,
            MAX_TOKENS[self.config.answer],
            wants_probability,
            self.sleep,
        )
        if not wants_probability:
            wanted = "the whole answer must be yes or no"
            return parse_answer(self.config, choice, parse_yes_or_no, wanted)
        probability = compute_word_probability(choice, "yes", "no")
        if probability is None:
            raise NoAnswer("neither yes nor no is among the log-probs of the first token")
        return probability


def compute_rubric_score(
    rubric: Sequence[Criterion], answers: Sequence[tuple[float, float]]
) -> tuple[float | None, float]:
    """Return the weighted mean of the answers, and the share of the weight without one.

    Example:
        Weights 2, 1, 1, of which the second question was not answered, with answers 1 and 0: 2 / 3
        of the weight with an answer, and .25 unreadable.

    Args:
        answers: (weight, answer in [0, 1]) of the questions that were answered.

    Returns:
        None as the score where more than ``MAX_UNREADABLE`` is unreadable.
    """
    total = sum(criterion.weight for criterion in rubric)
    readable = sum(weight for weight, _ in answers)
    unreadable = max(0.0, 1 - readable / total)
    if not answers or unreadable > MAX_UNREADABLE:
        return None, unreadable
    return sum(weight * answer for weight, answer in answers) / readable, unreadable


def read_rubric(metadata: str) -> list[Criterion]:
    """Read the questions in the further columns of a prompt: texts, or objects with ``question``
    and ``weight``.

    Raises:
        NoAnswer: there are none, or one of them cannot be used.
    """
    try:
        items = json.loads(metadata).get(COLUMN)
        # A column of CSV is text.
        if isinstance(items, str):
            items = json.loads(items)
        if not isinstance(items, list):
            raise ValueError("it is no list")
        rubric = [parse_criterion(item) for item in items]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise NoAnswer(NO_RUBRIC) from None
    if not rubric:
        raise NoAnswer(NO_RUBRIC)
    return rubric


def parse_criterion(item: Any) -> Criterion:
    """Parse one question of a rubric.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    if isinstance(item, str):
        item = {"question": item}
    question = item["question"]
    weight = item.get("weight", 1.0)
    if not isinstance(question, str) or not question.strip():
        raise ValueError("a question is empty")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < 1e6:
        raise ValueError(f"weight = {weight} is not positive")
    return Criterion(question.strip(), float(weight))
