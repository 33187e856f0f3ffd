"""What a look may spend, and what a number of prompts can show."""

from __future__ import annotations

import numpy as np
import pytest

from ebbflow.evaluation.look import (
    compute_look_error,
    compute_lowest_reward,
    count_effective_samples,
    find_needed_prompts,
    find_smallest_gain,
)
from ebbflow.recipe import Recipe
from ebbflow.recipe.guardrails import MIN_PROMPTS
from ebbflow.recipe.promotion import PromotionConfig


@pytest.mark.parametrize("looks", [1, 10, 52, 80])
def test_no_number_of_looks_spends_more_than_the_budget(looks: int) -> None:
    promotion = PromotionConfig()
    spent = 0.0
    for _ in range(looks):
        error = compute_look_error(promotion, spent)
        assert error > 0
        spent += error
    assert spent <= promotion.error_budget * (1 + 1e-12)
    # Of the looks that were planned each has the same share, but for the last one.
    if looks < promotion.looks_per_year:
        assert spent == pytest.approx(looks * promotion.error_budget / promotion.looks_per_year)


def test_a_spent_budget_leaves_nothing() -> None:
    assert compute_look_error(PromotionConfig(), 0.05) == 0


@pytest.mark.parametrize(
    ("rewards", "lowest"),
    [
        ([{"name": "ocr", "weight": 2}], 0.0),
        ([{"name": "ocr", "lowest": -0.5, "weight": 2}], -1.0),
        (["ocr", "jpeg_compressibility"], None),
        (["ocr", {"name": "jpeg_compressibility", "lowest": -3, "weight": 0.5}], -1.5),
        (["ocr", {"name": "jpeg_compressibility", "weight": 0}], 0.0),
    ],
)
def test_the_lowest_reward_is_the_weighted_sum(rewards: list[object], lowest: float | None) -> None:
    recipe = Recipe.model_validate({"rewards": rewards})
    columns = ["reward", "ocr", "jpeg_compressibility"]
    assert compute_lowest_reward(recipe, columns) == lowest


def test_the_lowest_reward_is_that_of_the_worst_prompt_set() -> None:
    sets = [{"name": name, "source": f"{name}.txt"} for name in ("words", "signs")]
    rewards = [
        {"name": "ocr", "prompts": ["words"]},
        {"name": "jpeg_compressibility", "lowest": -3, "prompts": ["signs"]},
    ]
    recipe = Recipe.model_validate(
        {"prompts": {"mixture": sets}, "rewards": rewards, "guardrails": []}
    )
    assert compute_lowest_reward(recipe, ["ocr", "jpeg_compressibility"]) == -3


def test_more_prompts_and_a_larger_error_show_smaller_gains() -> None:
    gains = [find_smallest_gain(prompts, 0.001) for prompts in (16, 64, 256)]
    assert gains == sorted(gains, reverse=True)
    assert find_smallest_gain(64, 0.025) < find_smallest_gain(64, 0.001)
    # That of a normal test is (3.09 + .84) / 16 = .246; a bound for all tails costs a little more.
    assert 0.246 < gains[-1] < 0.31


def test_more_samples_show_smaller_gains_down_to_what_no_valid_test_can_show() -> None:
    error = 0.05 / 52
    gains = [find_smallest_gain(64, error, samples) for samples in (1, 4, 16, 10_000)]
    assert gains == sorted(gains, reverse=True)
    # n equal gains g have a p-value of (1 + g / d)^-n; the rest is the noise of 10,000 samples.
    limit = 2.5 * (error ** (-1 / 64) - 1)
    assert limit < gains[-1] < limit + 0.03


def test_samples_count_as_the_variance_of_the_mean_over_prompts() -> None:
    assert count_effective_samples(128, 0, 4) == 1
    assert count_effective_samples(128, 128, 4) == 4
    assert count_effective_samples(128, 1000, 4) == 4
    assert count_effective_samples(128, 16, 4) == pytest.approx(128 / 116)


def test_the_needed_prompts_show_the_gain() -> None:
    prompts = find_needed_prompts(0.4, 0.001)
    assert find_smallest_gain(prompts, 0.001) <= 0.4
    assert find_smallest_gain(prompts * 4 // 5, 0.001) > 0.4
    assert find_needed_prompts(4.0, 0.025) == MIN_PROMPTS
    with pytest.raises(ValueError, match="too many prompts"):
        find_needed_prompts(0.001, 0.001)


def test_too_few_prompts_show_no_gain_at_all() -> None:
    assert np.isinf(find_smallest_gain(2, 0.001))
