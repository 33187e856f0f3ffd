"""The call of a user's own reward on noise, before a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ebbflow.data.prompts import Prompt
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards.base import Reward, RewardError, RewardResult
from ebbflow.rewards.trial import try_reward

PROMPTS = [
    Prompt(index, text, "", text, "here", "train", "{}") for index, text in enumerate(("A", "B"))
]
CALLS: list[tuple[int, ...]] = []


class Brightness(Reward):
    """``answer``: what it returns instead of what it should."""

    def __init__(self, answer: Any = None, missing: str | None = None) -> None:
        self.answer = answer
        self.missing = missing

    def explain_unavailable(self) -> str | None:
        return self.missing

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> Any:
        CALLS.append(images.shape)
        values = images.mean((1, 2, 3)) / 255
        match self.answer:
            case "raises":
                return prompts[0].metadata["score"]  # type: ignore[call-overload]
            case "values":
                return values
            case "mean":
                return RewardResult(values.mean())
            case "random":
                return RewardResult(values + len(CALLS))
            case "failed":
                return RewardResult(
                    np.full(len(images), np.nan), failures={0: "no face", 1: "no face"}
                )
        return RewardResult(values)


def tried(**options: Any) -> None:
    try_reward(configure_reward(f"{__name__}:Brightness", options=options), PROMPTS, 16, 32)


@pytest.mark.parametrize("answer", [None, "failed"])
def test_a_reward_that_keeps_its_contract(answer: str | None) -> None:
    CALLS.clear()
    tried(answer=answer)
    # Twice alike, and once with the prompts of the other images.
    assert CALLS == [(2, 16, 32, 3)] * 3


def test_one_that_cannot_run_here_is_not_called() -> None:
    CALLS.clear()
    tried(missing="no GPU")
    assert CALLS == []


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("values", "returned a ndarray; return an ebbflow.rewards.base.RewardResult"),
        ("mean", r"returned 'Brightness' of shape \(\) for 2 images"),
        (
            "random",
            r"gave the same images \[.*\] and then \[.*\]; a reward must not draw at random",
        ),
        ("raises", "fails on 2 images of 16 x 32 pixels: TypeError"),
    ],
)
def test_a_broken_contract_is_named(answer: str, says: str) -> None:
    with pytest.raises(RewardError, match=says):
        tried(answer=answer)


class Motion(Brightness):
    """A reward of whole videos."""

    scores = "videos"

    def __call__(self, videos: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        CALLS.append(videos.shape)
        return RewardResult(videos.mean((1, 2, 3, 4)))


def test_one_of_videos_is_tried_on_videos_where_the_model_draws_such() -> None:
    CALLS.clear()
    for frames in (4, 81):
        try_reward(configure_reward(f"{__name__}:Motion"), PROMPTS, 16, 32, frames)
    assert CALLS == [(2, 4, 16, 32, 3)] * 3 + [(2, 8, 16, 32, 3)] * 3
    with pytest.raises(
        RewardError,
        match="fails on 2 images of 16 x 32 pixels: RewardError: .*scores videos and got images",
    ):
        try_reward(configure_reward(f"{__name__}:Motion"), PROMPTS, 16, 32)


class FirstLetter(Reward):
    """Depends on image and prompt."""

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardResult:
        return RewardResult(images.mean((1, 2, 3)) + [ord(prompt.prompt) for prompt in prompts])


class Constant(Reward):
    """Finds nothing in noise, as a reward that reads text does."""

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardResult:
        return RewardResult(np.zeros(len(images)))


@pytest.mark.parametrize(
    ("reward", "ignores_prompt"),
    [("Brightness", True), ("FirstLetter", False), ("Constant", False)],
)
def test_a_reward_that_scores_images_alike_for_other_prompts_ignores_them(
    reward: str, ignores_prompt: bool
) -> None:
    config = configure_reward(f"{__name__}:{reward}")
    assert try_reward(config, PROMPTS, 16, 32).ignores_prompt is ignores_prompt
    assert not try_reward(config, PROMPTS[:1] * 2, 16, 32).ignores_prompt
