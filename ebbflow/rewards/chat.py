"""What rewards share that ask a vision-language model behind an OpenAI-compatible server about images."""

from __future__ import annotations

import base64
import json
import math
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ebbflow.rewards.http import NoAnswer, ServedRewardConfig, ask, shown

if TYPE_CHECKING:
    import numpy as np

    from ebbflow.data.prompts import Prompt

TOP_TOKENS = 20
"""Likeliest first tokens to ask for: as many as the usual servers give."""
Sleep = Callable[[float], None]


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


class Choice(_Part):
    """One answer of a model."""

    message: _Text
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None


class Completion(_Part):
    """The answer of ``/chat/completions``, as far as it is read."""

    choices: list[Choice] = Field(min_length=1)


class _Model(_Part):
    id: str


class Models(_Part):
    """The answer of ``/models``, as far as it is read."""

    data: list[_Model]


class ChatRewardConfig(ServedRewardConfig):
    """A reward that a model behind ``/chat/completions`` gives."""

    model: str = Field(min_length=1)
    """As the server calls it."""
    concurrency: int = Field(8, ge=1, le=64)
    """Requests at a time."""
    question: str = Field(min_length=1)
    """``{prompt}`` and ``{target}`` stand for those of the image's prompt; no other braces are taken."""

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


def base_url(url: str) -> str:
    """What comes before ``/chat/completions``: ``http://host:port`` stands for ``http://host:port/v1``, a path for itself."""
    return url if urlsplit(url).path else f"{url}/v1"


def missing_model(config: ChatRewardConfig, sleep: Sleep = time.sleep) -> str | None:
    """Why the model cannot be asked; None if the server has it."""
    url = base_url(config.url) + "/models"
    try:
        models = ask(config, url, Models, sleep=sleep)
    except NoAnswer as error:
        return str(error)
    served = [model.id for model in models.data]
    if config.model in served:
        return None
    return f"{url} has no model {config.model!r}; it has {shown(', '.join(served) or 'none', config)}"


def ask_about(
    config: ChatRewardConfig, images: np.ndarray, prompt: Prompt, max_tokens: int, log_probs: bool, sleep: Sleep = time.sleep
) -> Choice:
    """The model's answer to the question about images, uint8 RGB [n, height, width, 3], of one prompt.

    Args:
        log_probs: also ask for the log-probs of the likeliest tokens.

    Raises:
        NoAnswer: there is no usable one.
    """
    content = [_picture(image) for image in images] + [{"type": "text", "text": fill(config.question, prompt)}]
    request = {
        "model": config.model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": max_tokens,
        **({"logprobs": True, "top_logprobs": TOP_TOKENS} if log_probs else {}),
    }
    return ask(config, completions_url(config), Completion, json.dumps(request).encode(), sleep).choices[0]


def completions_url(config: ChatRewardConfig) -> str:
    """Where the questions go."""
    return base_url(config.url) + "/chat/completions"


def _picture(image: np.ndarray) -> dict[str, Any]:
    from ebbflow.data.images import encode_png

    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(encode_png(image[None])[0]).decode()}"},
    }


def fill(question: str, prompt: Prompt) -> str:
    """The question about one prompt. What stands in braces in the prompt itself is its text."""
    words = {"prompt": prompt.prompt, "target": prompt.target or ""}
    return re.sub(r"\{(prompt|target)\}", lambda match: words[match[1]], question)


def probability(choice: Choice, word: str, other: str) -> float | None:
    """P(word) / (P(word) + P(other)) of the first token, each over all its spellings; None where there is neither."""
    places = choice.logprobs.content if choice.logprobs else None
    found = [(token.token.strip().lower(), token.logprob) for token in (places[0].top_logprobs if places else [])]
    answers = [(said, log_prob) for said, log_prob in found if said in (word, other)]
    if not answers:
        return None
    largest = max(log_prob for _, log_prob in answers)  # which keeps the sum from being 0
    shares = {one: sum(math.exp(value - largest) for said, value in answers if said == one) for one in (word, other)}
    return shares[word] / (shares[word] + shares[other])
