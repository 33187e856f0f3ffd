"""Plain functions as rewards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from reward_cases import as_prompt

from ebbflow.recipe.registry import configure_reward
from ebbflow.recipe.rewards import CustomRewardConfig
from ebbflow.rewards.base import Reward, RewardError, RewardResult
from ebbflow.rewards.combine import load_reward, load_scorer
from ebbflow.rewards.functions import is_score_function
from ebbflow.rewards.trial import try_reward

IMAGES = np.arange(3 * 8 * 8 * 3, dtype=np.uint8).reshape(3, 8, 8, 3)
PROMPTS = [as_prompt(index, "AB" * index) for index in range(3)]


def score_brightness(images: np.ndarray, prompts: list[str]) -> list[float]:
    return [float(image.mean()) for image in images]


def score_target(
    images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]], factor: float = 1.0
) -> torch.Tensor:
    assert [prompt.prompt for prompt in PROMPTS] == prompts
    lengths = [len(row["target"]) for row in metadata]
    return torch.tensor(lengths, dtype=torch.bfloat16, requires_grad=True) * factor


def score_two(images: np.ndarray, prompts: list[str]) -> list[float]:
    return [1.0, float("nan")] * (len(images) // 2)


def build_reward(factor: float = 1.0) -> Reward:
    class Factor(Reward):
        def __call__(self, images: np.ndarray, prompts: list[Any]) -> RewardResult:
            return RewardResult(np.full(len(images), factor))

    return Factor()


def test_a_function_scores_images_and_texts() -> None:
    scorer = load_scorer([configure_reward(f"{__name__}:score_brightness")], ())
    table = scorer(IMAGES, PROMPTS)
    assert np.array_equal(table.reward, IMAGES.mean((1, 2, 3)))
    assert list(table.metrics) == ["score_brightness"]


def test_a_function_gets_metadata_and_options_and_returns_a_tensor() -> None:
    config = configure_reward(f"{__name__}:score_target", options={"factor": 2.0})
    assert load_reward(config)(IMAGES, PROMPTS).values.tolist() == [0.0, 4.0, 8.0]


def test_nan_of_a_function_is_a_failure_with_a_reason() -> None:
    result = load_reward(configure_reward(f"{__name__}:score_two"))(IMAGES[:2], PROMPTS[:2])
    assert result.failures == {1: "the function returned NaN"}


def test_another_number_of_scores_is_refused() -> None:
    with pytest.raises(RewardError, match="score_two"):
        load_scorer([configure_reward(f"{__name__}:score_two")], ())(IMAGES, PROMPTS)


def test_a_function_that_builds_a_reward_is_no_score() -> None:
    assert not is_score_function(build_reward)
    assert load_reward(configure_reward(f"{__name__}:build_reward"))(IMAGES, PROMPTS).values[0] == 1


def test_a_function_is_tried_before_a_run() -> None:
    assert try_reward(configure_reward(f"{__name__}:score_brightness"), PROMPTS[:2], 8, 8) == (
        try_reward(configure_reward(f"{__name__}:score_brightness"), PROMPTS[:2], 8, 8)
    )
    broken = configure_reward(f"{__name__}:score_target", options={"unknown": 1})
    with pytest.raises(RewardError, match="unexpected keyword argument 'unknown'"):
        try_reward(broken, PROMPTS[:2], 8, 8)


def score_with_threshold(images: Any, prompts: Any, metadata: Any, threshold: float) -> list[float]:
    return [threshold for _ in prompts]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"treshold": 0.5}, "rejects the options treshold: .*missing a required argument"),
        ({}, "missing a required argument: 'threshold'"),
        ({"threshold": 0.5, "other": 1}, "got an unexpected keyword argument 'other'"),
        ({"threshold": 0.5, "metadata": []}, "'metadata' is an argument of the call"),
    ],
)
def test_options_that_a_function_does_not_take_are_refused_before_it_is_called(
    options: dict[str, Any], says: str
) -> None:
    config = {"name": "custom", "path": f"{__name__}:score_with_threshold", "options": options}
    with pytest.raises(RewardError, match=says):
        load_reward(CustomRewardConfig.model_validate(config))
