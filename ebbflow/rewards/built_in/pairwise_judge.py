"""``pairwise_judge``: a vision-language model compares the images of a prompt, two at a time
(Pref-GRPO, 2508.20751).

    w_i = mean over j != i of P(image i is better than image j)

All pairs of a group are compared once, so a group of G images takes G (G - 1) / 2 requests.
Deviations from the published code (CodeGoat24/Pref-GRPO fastvideo/rewards): models prefer the first
of two images or the second: each image is first in half of its comparisons, where the code always
has the earlier sample first; an answer that names no winner is left out, where the code counts it
as half a win for both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from ebbflow.recipe.rewards import Scored
from ebbflow.rewards.base import NO_TARGET, Reward, RewardResult
from ebbflow.rewards.chat import (
    ChatReward,
    ChatRewardConfig,
    Choice,
    ask_about_images,
    build_completions_url,
    compute_word_probability,
    fill_question,
    judge_images,
)
from ebbflow.rewards.http import NoAnswer, quote_answer
from ebbflow.rewards.templates import fill_template

if TYPE_CHECKING:
    import numpy as np

    from ebbflow.data.prompts import Prompt

MAX_TOKENS = {
    "probability": 1,
    "choice": 8,
    "reasoned": 4096,
    "unified_reward": 512,
    "unified_reward_2": 4096,
}
"""Of an answer: one token, one number with what may stand around it, or a chain of thought."""
CHOICE = re.compile(r"[\W_]*(?:image\s*)?([12])[\W_]*", re.IGNORECASE)
REASONED = re.compile(r"<answer>\s*image\s*([12])\s*is better[\s.]*</answer>\s*", re.IGNORECASE)
VERDICT = re.compile(
    r"(?:image ([12]) is better|(both) images are equally good)(?=\W*(?:$|[\n.,;!]))", re.IGNORECASE
)
SHARES = re.compile(
    r"(?:alignment|coherence|style) score:\s*image 1:\s*([0-9.]+)\s*image 2:\s*([0-9.]+)",
    re.IGNORECASE,
)
WANTED = {
    "probability": (
        "neither 1 nor 2 is among the log-probs of its first token; take answer: choice where a"
        " server gives none"
    ),
    "choice": "the whole answer must be 1 or 2",
    "unified_reward": "it must say 'Image 1 is better', 2, or 'Both images are equally good'",
    "unified_reward_2": (
        "it must give both images an alignment, a coherence and a style score that add up to 1"
    ),
    "reasoned": "it must end with <answer>Image 1 is better</answer>, or 2",
}
"""Of an answer, for the message that it was something else."""


class PairwiseJudgeConfig(ChatRewardConfig):
    """Share of a prompt's other images that the image beats, 0 to 1, as a vision-language model
    behind a server compares them.
    """

    name: Literal["pairwise_judge"] = "pairwise_judge"
    question: str = Field(
        'Which of these two images is better, for the prompt "{prompt}"? Answer 1 or 2.',
        min_length=1,
    )
    """The question to the model. ``{prompt}`` and ``{target}`` are replaced by those of the images;
    the question has no other braces.
    """
    template: Literal["unified_reward", "unified_reward_2"] | None = None
    """The published question and answer of UnifiedReward (2503.05236), instead of ``question`` and
    ``answer``. ``unified_reward``: which image is better, or both. ``unified_reward_2``, for
    version 2.0: shares of alignment, coherence and style, whose mean is the score.
    """
    answer: Literal["probability", "choice", "reasoned"] = "probability"
    """Form of the answer. ``probability``: P(1) / (P(1) + P(2)) of the first token, a share of a
    win. ``choice``: 1 or 2. ``reasoned``: a text that ends with ``<answer>Image 1 is
    better</answer>``, as UnifiedReward-Think answers. Any other answer counts as no comparison.
    """

    @model_validator(mode="after")
    def _check_template_alone(self) -> PairwiseJudgeConfig:
        # By what the recipe sets: the defaults of both keys are always there.
        overridden = self.model_fields_set & {"question", "answer"}
        if self.template and overridden:
            raise ValueError(
                f"template = {self.template!r} has its own question and answer; leave"
                f" {' and '.join(sorted(overridden))} out"
            )
        return self

    @property
    def scores(self) -> Scored:
        return "pairs"

    def build(self) -> Reward:
        return PairwiseJudge(self)


class PairwiseJudge(ChatReward):
    """The win rate of each image inside its group; NaN with a reason where more than half of its
    comparisons failed.
    """

    scores = "pairs"

    config: PairwiseJudgeConfig

    def __call__(self, pairs: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        import numpy as np

        # All prompts of a call are the same one, so none of the pairs can be asked about.
        if self.config.reads and any(prompt.target is None for prompt in prompts):
            failures = dict.fromkeys(range(len(pairs)), NO_TARGET)
            return RewardResult(np.full(len(pairs), np.nan), failures=failures)
        return judge_images(self.config, self._judge_pair, pairs, prompts)

    def _judge_pair(self, pair: np.ndarray, prompt: Prompt) -> list[float]:
        """Return the probability that the first of two images, [2, height, width, 3], is better.

        Raises:
            NoAnswer: the answer names neither.
        """
        template = self.config.template
        form = template or self.config.answer
        if template:
            question = fill_template(f"{template}_pair", prompt.prompt)
        else:
            question = fill_question(self.config.question, prompt)
        asks_for_probability = form == "probability"
        choice = ask_about_images(
            self.config, list(pair), question, MAX_TOKENS[form], asks_for_probability, self.sleep
        )
        if asks_for_probability:
            outcome = compute_word_probability(choice, "1", "2")
        else:
            outcome = parse_answer_in_words(choice, form)
        if outcome is None:
            text = quote_answer((choice.message.content or "")[-200:], self.config)
            raise NoAnswer(
                f'{build_completions_url(self.config)} answered "{text}", which is no {form}:'
                f" {WANTED[form]}"
            )
        return [outcome]


def parse_answer_in_words(choice: Choice, answer: str) -> float | None:
    """Return 1 where the answer names the first image, 0 the second, or a share between; None for
    one that is cut or names neither.
    """
    # A cut answer may hold a verdict that its end would have taken back.
    text = choice.message.content or ""
    return None if choice.finish_reason == "length" else READERS[answer](text)


def parse_choice(text: str) -> float | None:
    """Return 1 or 0 for an answer of that one number, 1 or 2; None for any other."""
    match = CHOICE.fullmatch(text)
    return float(match[1] == "1") if match else None


def parse_reasoned_choice(text: str) -> float | None:
    """Return 1 or 0 for an answer that ends as UnifiedReward-Think's do; None for any other."""
    matches = list(REASONED.finditer(text))
    # At the end alone: a chain of thought may quote the form of the answer on its way.
    if not matches or matches[-1].end() != len(text):
        return None
    return float(matches[-1][1] == "1")


def parse_verdict(text: str) -> float | None:
    """Return 1, 0, or half for a draw, by the last verdict of UnifiedReward's that ends a sentence;
    None without one.
    """
    verdicts = list(VERDICT.finditer(text))
    if not verdicts:
        return None
    winner, draw = verdicts[-1].groups()
    return 0.5 if draw else float(winner == "1")


def parse_score_shares(text: str) -> float | None:
    """Return the mean share of the first image in the three scores of UnifiedReward 2.0; None where
    one is missing or no share.
    """
    try:
        shares = [(float(first), float(second)) for first, second in SHARES.findall(text)]
    except ValueError:  # "1.2.3", which the pattern takes for a number
        return None
    # The model is trained to give shares that add up to 1; others come from a misread question.
    if len(shares) != 3 or any(
        abs(first + second - 1) > 0.01 or not 0 <= first <= 1 for first, second in shares
    ):
        return None
    return sum(first for first, _ in shares) / 3


READERS = {
    "choice": parse_choice,
    "reasoned": parse_reasoned_choice,
    "unified_reward": parse_verdict,
    "unified_reward_2": parse_score_shares,
}
