"""``vision_judge``: a vision-language model behind an OpenAI-compatible server answers a question about each image.

The probability of "yes" as a score is that of VQAScore (2404.01291). Here it is P(yes) / (P(yes) + P(no)), from the likeliest
first tokens that the server gives. Answers in words are taken to the letter or not at all.
"""

from __future__ import annotations

import base64
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ebbflow.rewards.base import NO_TARGET, RewardResult
from ebbflow.rewards.http import NoAnswer, ServedRewardConfig, ask, shown

if TYPE_CHECKING:
    import numpy as np

    from ebbflow.data.prompts import Prompt
    from ebbflow.rewards.base import Reward

TOP_TOKENS = 20
"""Likeliest first tokens to ask for: as many as the usual servers give."""
MAX_TOKENS = {"probability": 1, "yes_no": 8, "number": 16}
"""Of an answer: enough for the one word or number that is taken, and for the next one that spoils it."""
YES_OR_NO = re.compile(r"[\W_]*(yes|no)[\W_]*", re.IGNORECASE)
NUMBER = re.compile(r"\s*([+-]?[0-9]+(?:\.[0-9]+)?)\s*")
WANTED = {
    "probability": "neither yes nor no is among the log-probs of its first token; take answer: yes_no where a server gives none",
    "yes_no": "the whole answer must be yes or no",
    "number": "the whole answer must be one number from 0 to scale",
}
"""Of an answer, for the message that it was something else."""


class _Part(BaseModel):
    """Part of what a server sends; whatever else it sends is not looked at."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


class _Token(_Part):
    token: str
    logprob: float = Field(le=1e-3)  # rounding may leave the logarithm of a probability a little above 0


class _Place(_Part):
    top_logprobs: list[_Token]


class _LogProbs(_Part):
    content: list[_Place] | None = None


class _Text(_Part):
    content: str | None = None


class _Choice(_Part):
    message: _Text
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None


class Completion(_Part):
    """The answer of ``/chat/completions``, as far as it is read."""

    choices: list[_Choice] = Field(min_length=1)


class _Model(_Part):
    id: str


class Models(_Part):
    """The answer of ``/models``, as far as it is read."""

    data: list[_Model]


class VisionJudgeConfig(ServedRewardConfig):
    """A vision-language model behind an OpenAI-compatible server answers a question about the image, 0 to 1."""

    name: Literal["vision_judge"] = "vision_judge"
    model: str = Field(min_length=1)
    """As the server calls it."""
    concurrency: int = Field(8, ge=1, le=64)
    """Requests at a time, of one image each."""
    question: str = Field('Does this image show: {prompt}? Answer "yes" or "no".', min_length=1)
    """``{prompt}`` and ``{target}`` stand for those of the image's prompt; no other braces are taken."""
    answer: Literal["probability", "yes_no", "number"] = "probability"
    """``probability``: P(yes) / (P(yes) + P(no)) of the first token. ``yes_no``: 1 or 0. ``number``: a number from 0 to
    ``scale``, divided by it. Every other answer is a failure, never a guess."""
    scale: float = Field(10.0, gt=0)

    @field_validator("question")
    @classmethod
    def _names_nothing_else(cls, question: str) -> str:
        rest = question.replace("{prompt}", "").replace("{target}", "")
        if "{" in rest or "}" in rest:
            raise ValueError("{prompt} and {target} are all that may stand in braces")
        return question

    @property
    def reads(self) -> bool:
        return "{target}" in self.question

    def build(self) -> Reward:
        return VisionJudge(self)


class VisionJudge:
    """The model's answer as a number from 0 to 1; NaN with a reason for an answer that is none."""

    name = "vision_judge"

    def __init__(self, config: VisionJudgeConfig, sleep: Callable[[float], None] = time.sleep) -> None:
        self.config = config
        self.sleep = sleep

    def unavailable(self) -> str | None:
        url = base_url(self.config.url) + "/models"
        try:
            models = ask(self.config, url, Models, sleep=self.sleep)
        except NoAnswer as error:
            return str(error)
        served = [model.id for model in models.data]
        if self.config.model in served:
            return None
        return f"{url} has no model {self.config.model!r}; it has {shown(', '.join(served) or 'none', self.config)}"

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        import numpy as np

        values = np.full(len(images), np.nan)
        failures: dict[int, str] = {}
        with ThreadPoolExecutor(self.config.concurrency) as pool:
            for index, judged in enumerate(pool.map(self._judge, images, prompts)):
                if isinstance(judged, str):
                    failures[index] = judged
                else:
                    values[index] = judged
        return RewardResult(values, failures=failures)

    def _judge(self, image: np.ndarray, prompt: Prompt) -> float | str:
        """The score, or why there is none."""
        if self.config.reads and prompt.target is None:
            return NO_TARGET
        url = base_url(self.config.url) + "/chat/completions"
        try:
            choice = ask(self.config, url, Completion, self._request(image, prompt), self.sleep).choices[0]
        except NoAnswer as error:
            return str(error)
        judged = probability(choice) if self.config.answer == "probability" else self._in_words(choice)
        if judged is None:
            text = shown(choice.message.content or "", self.config)
            return f'{url} answered "{text}", which is no {self.config.answer}: {WANTED[self.config.answer]}'
        return judged

    def _in_words(self, choice: _Choice) -> float | None:
        text = choice.message.content or ""
        if choice.finish_reason == "length":
            return None
        return yes_or_no(text) if self.config.answer == "yes_no" else number(text, self.config.scale)

    def _request(self, image: np.ndarray, prompt: Prompt) -> bytes:
        from ebbflow.data.images import encode_png

        picture = base64.b64encode(encode_png(image[None])[0]).decode()
        content = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
            {"type": "text", "text": fill(self.config.question, prompt)},
        ]
        log_probs = {"logprobs": True, "top_logprobs": TOP_TOKENS} if self.config.answer == "probability" else {}
        request = {
            "model": self.config.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS[self.config.answer],
            **log_probs,
        }
        return json.dumps(request).encode()


def base_url(url: str) -> str:
    """What comes before ``/chat/completions``: ``http://host:port`` stands for ``http://host:port/v1``, a path for itself."""
    return url if urlsplit(url).path else f"{url}/v1"


def fill(question: str, prompt: Prompt) -> str:
    """The question about one prompt. What stands in braces in the prompt itself is its text."""
    words = {"prompt": prompt.prompt, "target": prompt.target or ""}
    return re.sub(r"\{(prompt|target)\}", lambda match: words[match[1]], question)


def probability(choice: _Choice) -> float | None:
    """P(yes) / (P(yes) + P(no)) of the first token, each over all its spellings; None where there is neither."""
    places = choice.logprobs.content if choice.logprobs else None
    found = [(token.token.strip().lower(), token.logprob) for token in (places[0].top_logprobs if places else [])]
    answers = [(word, log_prob) for word, log_prob in found if word in ("yes", "no")]
    if not answers:
        return None
    largest = max(log_prob for _, log_prob in answers)  # which keeps the sum from being 0
    shares = {word: sum(math.exp(value - largest) for other, value in answers if other == word) for word in ("yes", "no")}
    return shares["yes"] / (shares["yes"] + shares["no"])


def yes_or_no(text: str) -> float | None:
    """1 or 0 for an answer of that one word; None for any other."""
    match = YES_OR_NO.fullmatch(text)
    return float(match[1].lower() == "yes") if match else None


def number(text: str, scale: float) -> float | None:
    """The share of ``scale`` that an answer of one number in [0, scale] is; None for any other."""
    match = NUMBER.fullmatch(text)
    return float(match[1]) / scale if match and 0 <= float(match[1]) <= scale else None
