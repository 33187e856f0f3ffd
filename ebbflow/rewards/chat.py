"""Share what rewards need that ask a vision-language model behind an OpenAI-compatible server about
images.

The client of openai is not used: it takes its host, proxies and key from the environment, and a
token must go to no other host than the recipe's (``ebbflow.rewards.http``).
"""

from __future__ import annotations

import base64
import json
import math
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.http import NoAnswer, ServedRewardConfig, ask_server, quote_answer

if TYPE_CHECKING:
    import numpy as np

    from ebbflow.data.prompts import Prompt

TOP_TOKENS = 20
"""Likeliest first tokens to ask for: as many as the usual servers give."""
QUOTED_CHARACTERS = 200
"""The end of an answer that a message repeats: what was asked for comes last."""
YES_OR_NO = re.compile(r"[\W_]*(yes|no)[\W_]*", re.IGNORECASE)
Sleep = Callable[[float], None]
Answer = TypeVar("Answer")


class _ServerMessage(BaseModel):
    """Part of what a server sends; whatever else it sends is not looked at."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


class _Token(_ServerMessage):
    token: str
    # Rounding may leave the logarithm of a probability a little above 0.
    logprob: float = Field(le=1e-3)


class _TokenPosition(_ServerMessage):
    top_logprobs: list[_Token]


class _LogProbs(_ServerMessage):
    content: list[_TokenPosition] | None = None


class _Text(_ServerMessage):
    content: str | None = None


class Choice(_ServerMessage):
    """One answer of a model."""

    message: _Text
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None


class Completion(_ServerMessage):
    """The answer of ``/chat/completions``, as far as it is read."""

    choices: list[Choice] = Field(min_length=1)


class _Model(_ServerMessage):
    id: str


class Models(_ServerMessage):
    """The answer of ``/models``, as far as it is read."""

    data: list[_Model]


class ChatServerConfig(ServedRewardConfig):
    """A reward that a model behind ``/chat/completions`` gives."""

    model: str = Field(min_length=1)
    """Name of the model on the server."""
    concurrency: int = Field(8, ge=1, le=64)
    """Number of requests at the same time."""


class ChatRewardConfig(ChatServerConfig):
    """The same, with a question of the recipe's."""

    question: str = Field(min_length=1)
    """The question to the model. ``{prompt}`` and ``{target}`` are replaced by those of the image;
    the question has no other braces.
    """

    @field_validator("question")
    @classmethod
    def _check_placeholders(cls, question: str) -> str:
        rest = question.replace("{prompt}", "").replace("{target}", "")
        if "{" in rest or "}" in rest:
            raise ValueError("{prompt} and {target} are all that may stand in braces")
        return question

    @property
    def reads(self) -> bool:
        return "{target}" in self.question


def build_base_url(url: str) -> str:
    """Return what comes before ``/chat/completions``: ``http://host:port`` stands for
    ``http://host:port/v1``, a path for itself.
    """
    return url if urlsplit(url).path else f"{url}/v1"


def explain_missing_model(config: ChatServerConfig, sleep: Sleep = time.sleep) -> str | None:
    """Return why the model cannot be asked; None if the server has it."""
    url = build_base_url(config.url) + "/models"
    try:
        models = ask_server(config, url, Models, sleep=sleep)
    except NoAnswer as error:
        return str(error)
    served = [model.id for model in models.data]
    if config.model in served:
        return None
    return (
        f"{url} has no model {config.model!r}; it has"
        f" {quote_answer(', '.join(served) or 'none', config)}"
    )


def ask_about_images(
    config: ChatServerConfig,
    images: Sequence[np.ndarray],
    question: str,
    max_tokens: int,
    log_probs: bool = False,
    sleep: Sleep = time.sleep,
) -> Choice:
    """Return the model's answer to a question about images, each uint8 RGB [height, width, 3].

    Args:
        log_probs: also ask for the log-probs of the likeliest tokens.

    Raises:
        NoAnswer: there is no usable one.
    """
    content = [*map(_build_image_part, images), {"type": "text", "text": question}]
    request: dict[str, Any] = {
        "model": config.model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,  # a reward must give the same images the same scores
        "max_tokens": max_tokens,
    }
    if log_probs:
        request |= {"logprobs": True, "top_logprobs": TOP_TOKENS}
    body = json.dumps(request).encode()
    return ask_server(config, build_completions_url(config), Completion, body, sleep).choices[0]


def parse_answer(
    config: ChatServerConfig, choice: Choice, read: Callable[[str], Answer | None], wanted: str
) -> Answer:
    """Return what ``read`` takes from a whole answer.

    Raises:
        NoAnswer: it finds nothing, or the answer is cut; says what is ``wanted``.
    """
    text = choice.message.content or ""
    # An answer that ``max_tokens`` cut may end in half a number: "8" of "8.5".
    answer = None if choice.finish_reason == "length" else read(text)
    if answer is None:
        quoted = quote_answer(text[-QUOTED_CHARACTERS:], config)
        raise NoAnswer(f'{build_completions_url(config)} answered "{quoted}": {wanted}')
    return answer


class ChatReward(Reward):
    """A reward that asks a model behind ``/chat/completions``.

    Attributes:
        sleep: waits between attempts.
    """

    config: Any
    name: str

    def __init__(self, config: ChatServerConfig, sleep: Sleep = time.sleep) -> None:
        self.config = config
        self.name = config.name
        self.sleep = sleep

    def explain_unavailable(self) -> str | None:
        return explain_missing_model(self.config, self.sleep)


class ImageChatReward(ChatReward):
    """One that asks about each image by itself."""

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        return judge_images(
            self.config, self.judge_image, images, prompts, self.list_metric_names()
        )

    def list_metric_names(self) -> Sequence[str]:
        """Return the names of what ``judge_image`` gives after the score."""
        return ()

    @abstractmethod
    def judge_image(self, image: np.ndarray, prompt: Prompt) -> list[float]:
        """Return the score of an image, uint8 RGB [height, width, 3], and its metrics.

        Raises:
            NoAnswer: the model gave no answer that can be used, or the prompt lacks what is asked
                about.
        """


def judge_images(
    config: ChatServerConfig,
    judge: Callable[[np.ndarray, Prompt], list[float]],
    images: np.ndarray,
    prompts: Sequence[Prompt],
    metrics: Sequence[str] = (),
) -> RewardResult:
    """Score each image and its prompt with ``judge``, several at a time; ``NoAnswer`` fails one.

    Args:
        judge: to the score and the metrics, in their order.
        metrics: their names; a reward's column and an underscore come before them.
    """
    import numpy as np

    rows = np.full((len(images), 1 + len(metrics)), np.nan)  # a row has the score, then the metrics
    failures: dict[int, str] = {}

    def judge_or_explain(image: np.ndarray, prompt: Prompt) -> list[float] | str:
        try:
            return judge(image, prompt)
        except NoAnswer as error:
            return str(error)

    # Threads, because a request only waits. ``map`` keeps the order of the images, whatever the
    # order of the answers.
    with ThreadPoolExecutor(config.concurrency) as pool:
        for index, row in enumerate(pool.map(judge_or_explain, images, prompts)):
            if isinstance(row, str):
                failures[index] = row
            else:
                rows[index] = row
    columns = {
        f"{config.column}_{metric}": rows[:, 1 + number] for number, metric in enumerate(metrics)
    }
    return RewardResult(rows[:, 0], columns, failures)


def build_completions_url(config: ChatServerConfig) -> str:
    """Return the URL to which questions go."""
    return build_base_url(config.url) + "/chat/completions"


def _build_image_part(image: np.ndarray) -> dict[str, Any]:
    from ebbflow.data.images import encode_pngs

    # PNG, because JPEG would change what is judged.
    encoded = base64.b64encode(encode_pngs(image[None])[0]).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


def fill_question(question: str, prompt: Prompt) -> str:
    """Return the question about one prompt. What stands in braces in the prompt itself is its
    text.
    """
    # One pass, not two replacements: a prompt that holds "{target}" must come through unchanged.
    words = {"prompt": prompt.prompt, "target": prompt.target or ""}
    return re.sub(r"\{(prompt|target)\}", lambda match: words[match[1]], question)


def parse_yes_or_no(text: str) -> float | None:
    """Return 1 or 0 for an answer of that one word; None for any other."""
    match = YES_OR_NO.fullmatch(text)
    return float(match[1].lower() == "yes") if match else None


def compute_word_probability(choice: Choice, word: str, other: str) -> float | None:
    """Return P(word) / (P(word) + P(other)) of the first token, each over all its spellings; None
    where there is neither.

    Example:
        The tokens "Yes" with .6, " yes" with .2, "no" with .1 and "The" with .1 give (.6 + .2) /
        (.6 + .2 + .1) for ``yes`` against ``no``.
    """
    if choice.logprobs is None or not choice.logprobs.content:
        return None
    log_probs: dict[str, list[float]] = {word: [], other: []}
    for token in choice.logprobs.content[0].top_logprobs:
        # A vocabulary has "Yes", "yes" and " yes" as tokens of their own.
        spelling = token.token.strip().lower()
        if spelling in log_probs:
            log_probs[spelling].append(token.logprob)
    if not log_probs[word] and not log_probs[other]:
        return None
    # Relative to the largest, so that the sum cannot underflow to 0.
    largest = max(log_probs[word] + log_probs[other])
    share = sum(math.exp(value - largest) for value in log_probs[word])
    other_share = sum(math.exp(value - largest) for value in log_probs[other])
    return share / (share + other_share)
