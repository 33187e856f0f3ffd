"""The messages between the client and the server of a remote reward, in JSON over HTTP
(docs/rewards.md).

``POST /score`` takes a ``ScoreRequest`` and gives a ``ScoreAnswer``; ``GET /health`` gives a
``Health``. Unknown keys, numbers that are not finite and lists of different lengths are errors on
either side.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator

from ebbflow.recipe.rewards import MAX_SCORE

SCORE = "/score"
HEALTH = "/health"


MAX_JSON_VALUES = 2**17
"""Of a message. Each may become an object of 600 bytes, so it is counted before it is parsed
(``count_values``).
"""

Score = Annotated[float, Field(ge=-MAX_SCORE, le=MAX_SCORE)]
SentSamples = Literal["images", "videos", "sounds"]
"""What a request holds: images, videos, or videos with their sounds."""


class Message(BaseModel):
    """Base of every message: nothing is added, converted or infinite."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class PromptMessage(Message):
    """What an image was made for."""

    prompt: str
    negative_prompt: str = ""
    target: str | None = None
    metadata: dict[str, Any] = {}


class ScoreRequest(Message):
    """N images or videos of one size with their prompts.

    Example::

        {
            "images": ["iVBORw0KGgo..."],
            "prompts": [{"prompt": "two bears", "metadata": {"include": [...]}}]
        }
    """

    # FailFast: without it pydantic builds an error for each of a million wrong values.
    images: Annotated[list[str], FailFast()]
    """PNG files of 8-bit RGB in base64, animated for videos."""
    prompts: Annotated[list[PromptMessage], FailFast()]
    sounds: Annotated[list[str] | None, FailFast()] = None
    """16-bit WAV files of one rate and length in base64, each as long as its video."""

    @model_validator(mode="after")
    def _check_prompt_count(self) -> ScoreRequest:
        if len(self.images) != len(self.prompts):
            raise ValueError(
                f"{len(self.images)} images cannot be scored against {len(self.prompts)} prompts"
            )
        if self.sounds is not None and len(self.sounds) != len(self.images):
            raise ValueError(f"{len(self.images)} videos have {len(self.sounds)} sounds")
        return self


class ScoreAnswer(Message):
    """Scores of N images; null where the scorer failed, which is never a number.

    Example:
        Two images, of which the second could not be scored::

            {"scores": [0.25, null], "failures": {"1": "no face"}, "metrics": {"count": [2, null]},
             "ids": ["5891b5b522d5df08", "e258d248fda94c63"]}
    """

    scores: Annotated[list[Score | None], FailFast()]
    failures: dict[int, str] = {}
    """Why a score is null, by position."""
    metrics: dict[str, list[Score | None]] = {}
    """Further columns of N numbers, by name."""
    ids: Annotated[list[str] | None, FailFast()] = None
    """``identify_image`` of the images that were scored, in their order, so that scores of other
    images, or in another order, are noticed."""

    @model_validator(mode="after")
    def _check_column_lengths(self) -> ScoreAnswer:
        count = len(self.scores)
        for column, values in self.metrics.items():
            if len(values) != count:
                raise ValueError(
                    f"{count} scores and {len(values)} values of the metric {column!r}"
                )
        # A negative index would be read from the end of a list.
        for index in self.failures:
            if not 0 <= index < count or self.scores[index] is not None:
                raise ValueError(
                    f"a reason for the failure of image {index}, which has no null among its"
                    f" {count} scores"
                )
        return self


class Health(Message):
    """Whether scores can be had."""

    reward: str
    ready: bool
    scores: SentSamples = "images"
    """What a request holds."""


def identify_image(png: bytes) -> str:
    """Return the id of an image: the first 16 hexadecimal digits of the sha256 of its PNG file."""
    return hashlib.sha256(png).hexdigest()[:16]


def count_values(text: bytes | bytearray) -> int:
    """Return at least the number of values in JSON, or in a part of it: its commas and brackets, of
    which base64 has none.
    """
    # Closing brackets need no count: each value ends with a comma, or stands in an opened bracket.
    return sum(map(text.count, (b",", b"[", b"{")))


def describe_first_problem(error: ValidationError) -> str:
    """Return what is wrong with a message and where, without repeating what it holds."""
    problem = error.errors(include_input=False, include_url=False, include_context=False)[0]
    key = ".".join(str(part) for part in problem["loc"])
    reason = problem["msg"].removeprefix("Value error, ")  # of our own validators, above
    return f"{key}: {reason}" if key else reason
