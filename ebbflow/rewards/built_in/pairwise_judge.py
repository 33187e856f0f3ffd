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
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from ebbflow.rewards.base import NO_TARGET, RewardResult
from ebbflow.rewards.chat import (
    ChatReward,
    ChatRewardConfig,
    Choice,
    ask_about_images,
    build_completions_url,
    compute_word_probability,
    fill_question,
)
from ebbflow.rewards.http import NoAnswer, quote_answer
from ebbflow.rewards.templates import fill_template

if TYPE_CHECKING:
    import numpy as np

    from ebbflow.data.prompts import Prompt
    from ebbflow.rewards.base import GroupReward

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
    """``{prompt}`` and ``{target}`` stand for those of the images' prompt; no other braces are
    taken.
    """
    template: Literal["unified_reward", "unified_reward_2"] | None = None
    """The published question and answer of UnifiedReward (2503.05236) instead: which image is
    better, or both; of version 2.0, shares of alignment, coherence and style, whose mean counts.
    """
    answer: Literal["probability", "choice", "reasoned"] = "probability"
    """``compute_word_probability``: P(1) / (P(1) + P(2)) of the first token, a share of a win.
    ``choice``: 1 or
    2. ``reasoned``: a text that ends with ``<answer>Image 1 is better</answer>``, as
    UnifiedReward-Think answers. Every other answer is no comparison.
    """

    @model_validator(mode="after")
    def _check_template_alone(self) -> PairwiseJudgeConfig:
        if self.template and (given := self.model_fields_set & {"question", "answer"}):
            raise ValueError(
                f"template = {self.template!r} has its own question and answer; leave"
                f" {' and '.join(sorted(given))} out"
            )
        return self

    @property
    def compares(self) -> bool:
        return True

    def build(self) -> GroupReward:
        return PairwiseJudge(self)


class PairwiseJudge(ChatReward):
    """The win rate of each image inside its group; NaN with a reason where more than half of its
    comparisons failed.
    """

    config: PairwiseJudgeConfig

    def compare(self, images: np.ndarray, prompt: Prompt) -> RewardResult:
        import numpy as np

        from ebbflow.rewards.groups import compute_win_rates

        if self.config.reads and prompt.target is None:
            return RewardResult(
                np.full(len(images), np.nan), failures=dict.fromkeys(range(len(images)), NO_TARGET)
            )
        wins = np.full((len(images), len(images)), np.nan)
        reasons = dict[int, str]()
        pairs = list_balanced_pairs(len(images))
        with ThreadPoolExecutor(self.config.concurrency) as pool:
            outcomes = list(
                pool.map(lambda pair: self._judge_pair(images[list(pair)], prompt), pairs)
            )
        for (first, second), outcome in zip(pairs, outcomes, strict=True):
            if isinstance(outcome, str):
                reasons = {first: outcome, second: outcome} | reasons
            else:
                wins[first, second], wins[second, first] = outcome, 1 - outcome
        values = compute_win_rates(wins)
        failures = {int(index): reasons[int(index)] for index in np.flatnonzero(np.isnan(values))}
        unanswered = (np.isnan(wins).sum(1) - 1) / (len(images) - 1)
        return RewardResult(values, {f"{self.name}_unanswered": unanswered}, failures)

    def _judge_pair(self, two: np.ndarray, prompt: Prompt) -> float | str:
        """The probability that the first of two images is the better one, or why there is none."""
        template = self.config.template
        answer = self.config.template or self.config.answer
        question = (
            fill_template(f"{template}_pair", prompt.prompt)
            if template
            else fill_question(self.config.question, prompt)
        )
        try:
            choice = ask_about_images(
                self.config,
                list(two),
                question,
                MAX_TOKENS[answer],
                answer == "probability",
                self.sleep,
            )
        except NoAnswer as error:
            return str(error)
        judged = (
            compute_word_probability(choice, "1", "2")
            if answer == "probability"
            else parse_answer_in_words(choice, answer)
        )
        if judged is None:
            text = quote_answer((choice.message.content or "")[-200:], self.config)
            return (
                f'{build_completions_url(self.config)} answered "{text}", which is no {answer}:'
                f" {WANTED[answer]}"
            )
        return judged


def list_balanced_pairs(count: int) -> list[tuple[int, int]]:
    """Every pair of ``count`` images once, as (first, second): each image is first as often as it
    is second, or once more.
    """
    return [(i, j) if (j - i) % 2 else (j, i) for i, j in combinations(range(count), 2)]


def parse_answer_in_words(choice: Choice, answer: str) -> float | None:
    """1 where the answer names the first image, 0 the second, or a share between; None for one that
    is cut or names neither.
    """
    text = choice.message.content or ""
    return None if choice.finish_reason == "length" else READERS[answer](text)


def parse_choice(text: str) -> float | None:
    """1 or 0 for an answer of that one number, 1 or 2; None for any other."""
    match = CHOICE.fullmatch(text)
    return float(match[1] == "1") if match else None


def parse_reasoned_choice(text: str) -> float | None:
    """1 or 0 for an answer that ends as UnifiedReward-Think's do; None for any other."""
    match = _find_last_match(REASONED, text)
    return float(match[1] == "1") if match else None


def parse_verdict(text: str) -> float | None:
    """1, 0, or half for a draw, by the last verdict of UnifiedReward's that ends a sentence; None
    without one.
    """
    found = list(VERDICT.finditer(text))
    return None if not found else 0.5 if found[-1][2] else float(found[-1][1] == "1")


def parse_score_shares(text: str) -> float | None:
    """The mean share of the first image in the three scores of UnifiedReward 2.0; None where one is
    missing or no share.
    """
    try:
        shares = [(float(first), float(second)) for first, second in SHARES.findall(text)]
    except ValueError:
        return None
    if len(shares) != 3 or any(
        abs(first + second - 1) > 0.01 or not 0 <= first <= 1 for first, second in shares
    ):
        return None
    return sum(first for first, _ in shares) / 3


def _find_last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The match at the end of a text."""
    found = list(pattern.finditer(text))
    return found[-1] if found and found[-1].end() == len(text) else None


READERS = {
    "choice": parse_choice,
    "reasoned": parse_reasoned_choice,
    "unified_reward": parse_verdict,
    "unified_reward_2": parse_score_shares,
}
