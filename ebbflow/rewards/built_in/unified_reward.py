"""``unified_reward``: UnifiedReward (2503.05236) behind an OpenAI-compatible server rates single
images, as published.

Its comparisons of two images are ``pairwise_judge`` with a ``template``, UnifiedReward-Edit is
``edit_judge``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from ebbflow.rewards.chat import ChatServerConfig, ImageChatReward, ask_about_images, parse_answer
from ebbflow.rewards.templates import fill_template

if TYPE_CHECKING:
    import numpy as np

    from ebbflow.data.prompts import Prompt
    from ebbflow.rewards.base import Reward

MAX_TOKENS = 4096
SCALE = (1.0, 5.0)
NUMBER = r"[\s*]*([0-9]+(?:\.[0-9]+)?)(?![0-9.]*[0-9A-Za-z])"
FINAL = ("Final Score:",)
AXES = ("Alignment Score (1-5):", "Coherence Score (1-5):", "Style Score (1-5):")
METRICS = ("alignment", "coherence", "style")


class UnifiedRewardConfig(ChatServerConfig):
    """Alignment with the prompt and quality, 1 to 5, by UnifiedReward (2503.05236) behind a
    server."""

    known_lowest: ClassVar[float | None] = 1.0
    name: Literal["unified_reward"] = "unified_reward"
    template: Literal["unified_reward", "unified_reward_2"] = "unified_reward_2"
    """Form of the question and the answer. ``unified_reward_2``, for version 2.0: the score is the
    mean of alignment, coherence and style. ``unified_reward``, for the first version: the final
    score after a list of the elements.
    """

    def build(self) -> Reward:
        return UnifiedReward(self)


class UnifiedReward(ImageChatReward):
    """The published score, or the mean of the three published scores; NaN with a reason for another
    answer.
    """

    config: UnifiedRewardConfig

    def list_metric_names(self) -> Sequence[str]:
        return METRICS if self.config.template == "unified_reward_2" else ()

    def judge_image(self, image: np.ndarray, prompt: Prompt) -> list[float]:
        labels = AXES if self.config.template == "unified_reward_2" else FINAL
        question = fill_template(f"{self.config.template}_point", prompt.prompt)
        choice = ask_about_images(self.config, [image], question, MAX_TOKENS, sleep=self.sleep)
        wanted = f"it must have one number from 1 to 5 after {' and '.join(labels)}"
        scores = parse_answer(self.config, choice, partial(parse_scores, labels=labels), wanted)
        return scores if len(scores) == 1 else [sum(scores) / len(scores), *scores]


def parse_scores(text: str, labels: Sequence[str]) -> list[float] | None:
    """Return the one number from 1 to 5 after each label; None where one is missing, repeated or
    outside.
    """
    scores = []
    for label in labels:
        numbers = re.findall(re.escape(label) + NUMBER, text)
        # A model that gives two scores corrects itself, or repeats the question: neither is taken.
        if len(numbers) != 1 or not SCALE[0] <= float(numbers[0]) <= SCALE[1]:
            return None
        scores.append(float(numbers[0]))
    return scores
