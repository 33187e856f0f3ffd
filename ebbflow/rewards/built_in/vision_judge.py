"""``vision_judge``: a vision-language model behind an OpenAI-compatible server answers a question
about each image.

The probability of "yes" as a score is that of VQAScore (2404.01291). Here it is P(yes) / (P(yes) +
P(no)), from the likeliest first tokens that the server gives. Answers in words are taken to the
letter or not at all.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ebbflow.rewards.base import NO_TARGET
from ebbflow.rewards.chat import (
    ChatRewardConfig,
    Choice,
    ImageChatReward,
    ask_about_images,
    build_completions_url,
    compute_word_probability,
    fill_question,
    parse_yes_or_no,
)
from ebbflow.rewards.http import NoAnswer, quote_answer

if TYPE_CHECKING:
    import numpy as np

    from ebbflow.data.prompts import Prompt
    from ebbflow.rewards.base import Reward

MAX_TOKENS = {"probability": 1, "yes_no": 8, "number": 16}
"""Of an answer: enough for the one word or number that is taken, and for the next one that spoils
it.
"""
NUMBER = re.compile(r"\s*([+-]?[0-9]+(?:\.[0-9]+)?)\s*")
WANTED = {
    "probability": (
        "neither yes nor no is among the log-probs of its first token; take answer: yes_no where a"
        " server gives none"
    ),
    "yes_no": "the whole answer must be yes or no",
    "number": "the whole answer must be one number from 0 to scale",
}
"""Of an answer, for the message that it was something else."""


class VisionJudgeConfig(ChatRewardConfig):
    """A vision-language model behind an OpenAI-compatible server answers a question about the
    image, 0 to 1.
    """

    name: Literal["vision_judge"] = "vision_judge"
    question: str = Field('Does this image show: {prompt}? Answer "yes" or "no".', min_length=1)
    """The question to the model. ``{prompt}`` and ``{target}`` are replaced by those of the image;
    the question has no other braces.
    """
    answer: Literal["probability", "yes_no", "number"] = "probability"
    """Form of the answer. ``probability``: P(yes) / (P(yes) + P(no)) of the first token.
    ``yes_no``: 1 or 0. ``number``: a number from 0 to ``scale``, divided by ``scale``. Any other
    answer is a failure.
    """
    scale: float = Field(10.0, gt=0)
    """Largest number of the answer ``number``."""

    def build(self) -> Reward:
        return VisionJudge(self)


class VisionJudge(ImageChatReward):
    """The model's answer as a number from 0 to 1; NaN with a reason for an answer that is none."""

    config: VisionJudgeConfig

    def judge_image(self, image: np.ndarray, prompt: Prompt) -> list[float]:
        if self.config.reads and prompt.target is None:
            raise NoAnswer(NO_TARGET)
        answer = self.config.answer
        question = fill_question(self.config.question, prompt)
        choice = ask_about_images(
            self.config, [image], question, MAX_TOKENS[answer], answer == "probability", self.sleep
        )
        if answer == "probability":
            score = compute_word_probability(choice, "yes", "no")
        else:
            score = self._parse_in_words(choice)
        if score is None:
            text = quote_answer(choice.message.content or "", self.config)
            raise NoAnswer(
                f'{build_completions_url(self.config)} answered "{text}", which is no {answer}:'
                f" {WANTED[answer]}"
            )
        return [score]

    def _parse_in_words(self, choice: Choice) -> float | None:
        text = choice.message.content or ""
        # What was cut may go on: "1" of "10".
        if choice.finish_reason == "length":
            return None
        if self.config.answer == "yes_no":
            return parse_yes_or_no(text)
        return parse_number(text, self.config.scale)


def parse_number(text: str, scale: float) -> float | None:
    """Return the share of ``scale`` that an answer of one number in [0, scale] is; None for any
    other.
    """
    match = NUMBER.fullmatch(text)
    if match is None or not 0 <= float(match[1]) <= scale:
        return None
    return float(match[1]) / scale
