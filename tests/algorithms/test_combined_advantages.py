"""Advantages from several rewards: their sum, each for itself, and those of a prompt set alone."""

import numpy as np
import pytest
from advantage_cases import MODES, NAN, OTHER, PROMPTS, REWARDS, advantages, combine_advantages

from ebbflow.algorithms.advantages import PromptStatistics, find_varied_prompts
from ebbflow.recipe.choices import AdvantagesConfig


def z(rewards):
    """By group, of REWARDS' prompts."""
    groups = np.split(np.array(rewards, np.float64), [3])
    return np.concatenate([(group - group.mean()) / (group.std(ddof=1) + 1e-4) for group in groups])


def test_per_reward_normalises_each_and_adds_them_with_the_weights():
    result = combine_advantages(
        {"a": REWARDS, "b": OTHER}, {"a": 3.0, "b": 1.0}, PROMPTS, combine="per_reward"
    )
    assert result.values == pytest.approx(3 * z(REWARDS) + z(OTHER), abs=1e-6)


def test_sum_normalises_the_weighted_sum_once():
    result = combine_advantages(
        {"a": REWARDS, "b": OTHER}, {"a": 3.0, "b": 0.5}, PROMPTS, combine="sum"
    )
    assert result.values == pytest.approx(
        z(3 * np.array(REWARDS) + 0.5 * np.array(OTHER)), abs=1e-6
    )


@pytest.mark.parametrize("combine", ["sum", "per_reward"])
def test_reward_metrics_are_of_the_weighted_sum(combine):
    total = 3 * np.array(REWARDS) + 0.5 * np.array(OTHER)
    metrics = combine_advantages(
        {"a": REWARDS, "b": OTHER}, {"a": 3.0, "b": 0.5}, PROMPTS, combine=combine
    ).metrics
    found = [metrics[f"reward/{name}"] for name in ("mean", "std", "min", "max")]
    assert found == pytest.approx([total.mean(), total.std(), total.min(), total.max()])


@pytest.mark.parametrize("std", MODES)
@pytest.mark.parametrize("weight", [1.0, 0.3, 7.0])
def test_with_one_reward_the_combinations_agree_but_for_its_weight(std, weight):
    once = advantages(REWARDS, PROMPTS, std, combine="sum")
    each = combine_advantages(
        {"only": REWARDS}, {"only": weight}, PROMPTS, std=std, combine="per_reward"
    )
    assert each.values == pytest.approx(weight * once.values, rel=1e-6)
    if weight == 1:
        assert each.values.tolist() == once.values.tolist()


def test_the_scale_of_a_reward_decides_its_share_of_a_sum_and_of_nothing_else():
    def alignment(combine, scale):
        result = combine_advantages(
            {"a": REWARDS, "b": scale * np.array(OTHER)},
            {"a": 1.0, "b": 1.0},
            PROMPTS,
            combine=combine,
        )
        return np.corrcoef(result.values, z(OTHER))[0, 1]

    assert alignment("sum", 1000) > 0.999
    assert alignment("per_reward", 1000) == pytest.approx(alignment("per_reward", 1), abs=1e-3)


@pytest.mark.parametrize("combine", ["sum", "per_reward"])
def test_a_sample_needs_every_score(combine):
    holes = combine_advantages(
        {"a": [*REWARDS, 0.3], "b": [*OTHER, NAN]},
        {"a": 1.0, "b": 2.0},
        [*PROMPTS, 7],
        combine=combine,
    )
    whole = combine_advantages(
        {"a": REWARDS, "b": OTHER}, {"a": 1.0, "b": 2.0}, PROMPTS, combine=combine
    )
    assert holes.keep.tolist() == [True] * 7 + [False]
    assert holes.values.tolist() == [*whole.values, 0]
    assert holes.metrics["reward/scored_share"] == 7 / 8


def test_a_group_is_uninformative_only_when_every_reward_is():
    first = [0.5, 0.5, 0.1, 0.1, 0.4, 0.6]
    second = [2, 2, 1, 3, 7, 7]
    result = combine_advantages({"a": first, "b": second}, {"a": 1.0, "b": 1.0}, [0, 0, 1, 1, 2, 2])
    assert result.keep.tolist() == [False, False, True, True, True, True]
    # The reward without a spread adds nothing.
    assert result.values[2:] == pytest.approx(np.sqrt(0.5) * np.array([-1, 1, -1, 1]), abs=1e-3)
    assert result.metrics["group/zero_std_share"] == pytest.approx(1 / 3)


def test_a_sum_without_spread_is_uninformative_even_if_its_parts_vary():
    opposed = {"a": [0.0, 1.0], "b": [1.0, 0.0]}, {"a": 1.0, "b": 1.0}
    assert not combine_advantages(*opposed, [0, 0], combine="sum").keep.any()
    assert combine_advantages(*opposed, [0, 0], combine="per_reward").keep.all()


OF_SETS = {
    "spells": [1.0, 3.0, NAN, NAN, NAN, 5.0],
    "pleases": [NAN, NAN, 10.0, 30.0, NAN, NAN],
    "always": [0.0, 0.0, 2.0, 1.0, 7.0, NAN],
}
"""Prompt 1 has ``spells``, prompt 2 ``pleases``, and both ``always``; the last sample of each is
not scored.
"""
OF_PROMPTS = [1, 1, 2, 2, 2, 1]
HAS_A_REWARD = np.array([True] * 4 + [False] * 2)


@pytest.mark.parametrize(
    ("combine", "std"), [("sum", "group"), ("per_reward", "group"), ("per_reward", "global")]
)
@pytest.mark.parametrize("running", [False, True])
def test_a_reward_of_a_prompt_set_is_normalised_among_its_own_samples(combine, std, running):
    """As if each prompt had come with its own rewards alone; a global std is of the samples that a
    reward scores.
    """
    weights = {"spells": 2.0, "pleases": 0.5, "always": 1.0}
    keys = {"combine": combine, "std": std, "running": running}
    found = combine_advantages(
        OF_SETS, weights, OF_PROMPTS, PromptStatistics(), scored=HAS_A_REWARD, **keys
    )
    assert found.keep.tolist() == HAS_A_REWARD.tolist()
    for rows, names in ((slice(0, 2), ("spells", "always")), (slice(2, 4), ("pleases", "always"))):
        alone = {name: OF_SETS[name][rows] for name in names}
        if std == "global":  # of the reward that all have, the std is over both prompts
            alone.pop("always")
            shared = combine_advantages(
                {"always": OF_SETS["always"][:4]},
                {"always": 1.0},
                OF_PROMPTS[:4],
                PromptStatistics(),
                **keys,
            )
        wanted = combine_advantages(
            alone,
            {name: weights[name] for name in alone},
            OF_PROMPTS[rows],
            PromptStatistics(),
            **keys,
        )
        extra = shared.values[rows] if std == "global" else 0.0
        assert found.values[rows] == pytest.approx(wanted.values + extra, abs=1e-6)


def test_without_word_of_what_is_scored_a_missing_score_masks_the_sample():
    assert not combine_advantages(OF_SETS, dict.fromkeys(OF_SETS, 1.0), OF_PROMPTS).keep.any()


def test_a_prompt_varies_by_the_rewards_that_it_has():
    scores = {name: np.array(values) for name, values in OF_SETS.items()}
    for combine in ("sum", "per_reward"):
        config = AdvantagesConfig(combine=combine)
        assert find_varied_prompts(
            scores, dict.fromkeys(scores, 1.0), np.array(OF_PROMPTS), config, HAS_A_REWARD
        ) == [1, 2]
