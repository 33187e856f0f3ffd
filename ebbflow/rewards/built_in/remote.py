"""``remote``: the score of a server that speaks ``ebbflow.rewards.protocol``, for scorers with
needs of their own.
"""

from __future__ import annotations

import base64
import json
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ebbflow.recipe.rewards import Scored
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.http import NoAnswer, ServedRewardConfig, ask_server, quote_answer
from ebbflow.rewards.protocol import (
    HEALTH,
    SCORE,
    Health,
    PromptMessage,
    ScoreAnswer,
    ScoreRequest,
    SentSamples,
    identify_image,
)

if TYPE_CHECKING:
    import numpy as np

    from ebbflow.data.prompts import Prompt
    from ebbflow.rewards.samples import SoundedVideos


class RemoteConfig(ServedRewardConfig):
    """A score from a server of rewards: ``ebbflow serve-reward``, GenEval, whatever speaks the
    protocol of docs/rewards.md.
    """

    name: Literal["remote"] = "remote"
    samples: SentSamples = "images"
    """What the server scores. ``images``: of a video, frames as single images. ``videos``: whole
    videos. ``sounds``: whole videos with their sound."""
    batch: int = Field(16, ge=1, le=256)
    """Images or videos per request."""
    metrics: list[Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")]] = []
    """Further columns of the server's answer to keep, each as ``<label>_<column>``. Others are
    dropped.
    """

    @property
    def scores(self) -> Scored:
        return self.samples

    def build(self) -> Reward:
        by_samples: dict[str, type[Remote]] = {
            one.scores: one for one in (Remote, RemoteOfVideos, RemoteOfSounds)
        }
        return by_samples[self.samples](self)


class Remote(Reward):
    """What the server scores; NaN with a reason for every sample of a request that got no usable
    answer.
    """

    name = "remote"

    def __init__(self, config: RemoteConfig, sleep: Callable[[float], None] = time.sleep) -> None:
        self.config = config
        self.sleep = sleep

    def explain_unavailable(self) -> str | None:
        try:
            health = ask_server(self.config, self.config.url + HEALTH, Health, sleep=self.sleep)
        except NoAnswer as error:
            return str(error)
        reward = f"{self.config.url}: the reward {quote_answer(health.reward, self.config)}"
        if health.scores != self.scores:
            return (
                f"{reward} scores {health.scores}, and the recipe sends {self.scores}; set samples"
                f" to {health.scores}"
            )
        return None if health.ready else f"{reward} is not ready; wait until the server is"

    def __call__(
        self, images: np.ndarray | SoundedVideos, prompts: Sequence[Prompt]
    ) -> RewardResult:
        import numpy as np

        values = np.full(len(images), np.nan)
        metrics = {
            f"{self.name}_{column}": np.full(len(images), np.nan) for column in self.config.metrics
        }
        failures: dict[int, str] = {}
        for start in range(0, len(images), self.config.batch):
            part = slice(start, start + self.config.batch)
            try:
                answer = self._ask_for_scores(images[part], prompts[part])
            except NoAnswer as error:
                # Only the images of this request fail: the next one may get through.
                failures |= dict.fromkeys(range(len(images))[part], str(error))
                continue
            values[part] = _none_to_nan(answer.scores)
            for column in self.config.metrics:
                metrics[f"{self.name}_{column}"][part] = _none_to_nan(answer.metrics[column])
            # The server counts the images of a request from 0, a result those of the call.
            for index, score in enumerate(answer.scores):
                if score is None:
                    failures[start + index] = quote_answer(
                        answer.failures.get(index, "the server gave no reason"), self.config
                    )
        return RewardResult(values, metrics, failures)

    def _ask_for_scores(
        self, images: np.ndarray | SoundedVideos, prompts: Sequence[Prompt]
    ) -> ScoreAnswer:
        url = self.config.url + SCORE
        request = build_request(images, prompts)
        # What is unset, the sounds, is no key: a server that knows images alone would refuse it.
        body = request.model_dump_json(exclude_unset=True).encode()
        answer = ask_server(self.config, url, ScoreAnswer, body, self.sleep)
        # The form of the answer is checked; whether it fits the question only the asker knows.
        if len(answer.scores) != len(images):
            raise NoAnswer(f"{url} answered {len(answer.scores)} scores for {len(images)} images")
        ids = [identify_image(base64.b64decode(image)) for image in request.images]
        if answer.ids is None:
            warnings.warn(
                f"{url} answers without the ids of the images, so scores in another order would not"
                " be noticed; let it add 'ids' (docs/rewards.md)",
                stacklevel=3,
            )
        elif answer.ids != ids:
            raise NoAnswer(f"{url} answered about other images, or in another order")
        missing = set(self.config.metrics) - answer.metrics.keys()
        if missing:
            available = quote_answer(", ".join(answer.metrics) or "none", self.config)
            raise NoAnswer(
                f"{url} answered without the metrics {sorted(missing)}; it has {available}"
            )
        return answer


class RemoteOfVideos(Remote):
    """A server that scores whole videos."""

    scores = "videos"


class RemoteOfSounds(Remote):
    """A server that scores whole videos with their sound."""

    scores = "sounds"


def build_request(images: np.ndarray | SoundedVideos, prompts: Sequence[Prompt]) -> ScoreRequest:
    """Build the message for samples, uint8 RGB [N, height, width, 3], or videos, [N, frames,
    height, width, 3], with or without sounds, and their prompts.
    """
    from ebbflow.data.images import encode_pngs
    from ebbflow.data.sounds import encode_wavs
    from ebbflow.rewards.samples import SoundedVideos

    sounds = {}
    if isinstance(images, SoundedVideos):
        sounds["sounds"] = _encode_base64(encode_wavs(images.sounds))
        images = images.videos
    return ScoreRequest(
        images=_encode_base64(encode_pngs(images)),
        prompts=[
            PromptMessage(
                prompt=prompt.prompt,
                negative_prompt=prompt.negative_prompt,
                target=prompt.target,
                metadata=json.loads(prompt.metadata),
            )
            for prompt in prompts
        ],
        **sounds,
    )


def _encode_base64(files: Sequence[bytes]) -> list[str]:
    return [base64.b64encode(file).decode() for file in files]


def _none_to_nan(values: Sequence[float | None]) -> np.ndarray:
    """Return float64 [N], NaN for None."""
    import numpy as np

    return np.array([np.nan if value is None else value for value in values], np.float64)
