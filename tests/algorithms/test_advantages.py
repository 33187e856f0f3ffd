"""Advantages from one reward: normalised, clipped, trimmed, and of the extremes alone."""

import numpy as np
import pytest
from advantage_cases import MODES, NAN, PROMPTS, REWARDS, advantages, batches, combine_advantages
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.algorithms.advantages import PromptStatistics
from ebbflow.recipe.rewards import MAX_SCORE, MAX_WEIGHT


def by_group(function):
    return np.concatenate([function(np.array(REWARDS[:3])), function(np.array(REWARDS[3:]))])


@pytest.mark.parametrize(
    ("std", "expected"),
    [
        ("group", by_group(lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-4))),
        ("global", by_group(lambda r: (r - r.mean()) / (np.std(REWARDS, ddof=1) + 1e-4))),
        ("none", by_group(lambda r: r - r.mean())),
    ],
)
def test_advantages_are_divided_by_the_configured_std(std, expected):
    result = advantages(REWARDS, PROMPTS, std)
    assert result.keep.all()
    assert result.values.dtype == np.float32
    assert result.values == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("std", MODES)
def test_a_group_of_one_says_nothing(std):
    result = advantages([0.9, 0.1, 0.5], [1, 2, 2], std)
    assert result.keep.tolist() == [False, True, True]
    assert result.values[0] == 0
    assert result.metrics["group/dropped_samples"] == 1


@pytest.mark.parametrize("std", MODES)
@pytest.mark.parametrize("equal", [0.3, 0.0, 1e6])
def test_a_group_without_variance_is_dropped_and_counted(std, equal):
    result = advantages([equal] * 3 + [0.1, 0.2, 0.3], [0, 0, 0, 1, 1, 1], std)
    assert result.keep.tolist() == [False] * 3 + [True] * 3
    assert (result.values[:3] == 0).all()
    assert result.metrics["group/zero_std_share"] == 0.5
    assert result.metrics["group/dropped_samples"] == 3


@pytest.mark.parametrize("std", MODES)
@pytest.mark.parametrize("failed", [NAN, float("inf"), float("-inf"), 1e308, -1e200])
def test_failed_scores_are_masked_and_change_nothing_else(std, failed):
    whole = advantages(REWARDS, PROMPTS, std)
    holes = advantages([failed, *REWARDS, failed], [4, *PROMPTS, 7], std)
    assert holes.keep.tolist() == [False, *whole.keep, False]
    assert holes.values.tolist() == [0, *whole.values, 0]
    assert holes.metrics["reward/scored_share"] == pytest.approx(7 / 9)
    for name in (
        "reward/mean",
        "reward/min",
        "reward/max",
        "reward/std",
        "group/zero_std_share",
        "advantage/std",
    ):
        assert holes.metrics[name] == whole.metrics[name]


@pytest.mark.parametrize("std", MODES)
@pytest.mark.parametrize("combine", ["sum", "per_reward"])
@pytest.mark.parametrize("running", [False, True])
def test_the_largest_scores_and_weights_give_finite_advantages(std, combine, running):
    rewards = {
        "a": [MAX_SCORE, -MAX_SCORE, 0.5, 1, -MAX_SCORE],
        "b": [-MAX_SCORE, 0, 1, MAX_SCORE, MAX_SCORE],
    }
    history = PromptStatistics() if running else None
    weights = {"a": MAX_WEIGHT, "b": 1.0}
    for _ in range(2):
        result = combine_advantages(
            rewards,
            weights,
            [0, 0, 0, 1, 1],
            history,
            std=std,
            combine=combine,
            running=running,
            clip=5.0,
        )
        assert result.keep.all()
        assert np.isfinite(result.values).all()
        assert np.isfinite(list(result.metrics.values())).all()


def test_a_group_with_one_score_left_says_nothing():
    result = advantages([0.5, NAN, NAN, 0.1, 0.2], [0, 0, 0, 1, 1])
    assert result.keep.tolist() == [False, False, False, True, True]
    assert result.metrics["group/zero_std_share"] == 0.5


@pytest.mark.parametrize("std", MODES)
def test_nothing_scored_is_nothing_to_train_on(std):
    result = advantages([NAN] * 4, [0, 0, 1, 1], std)
    assert not result.keep.any()
    assert (result.values == 0).all()
    assert result.metrics["reward/scored_share"] == 0
    assert result.metrics["group/zero_std_share"] == 1
    assert result.metrics["group/dropped_samples"] == 4
    assert all(np.isfinite(value) for value in result.metrics.values())


def test_global_std_is_the_unbiased_std_over_samples_whatever_their_groups():
    # Both prompts have mean 0, so the divisor is REWARDS / advantages; repeating rewards over
    # timesteps would shrink it.
    result = advantages([-1, 1, -3, 3], [0, 0, 1, 1], "global")
    divisors = np.array([-1, 1, -3, 3]) / result.values
    assert divisors == pytest.approx([np.sqrt(20 / 3) + 1e-4] * 4, rel=1e-6)


def test_advantages_are_clipped_to_the_limit():
    result = advantages([0] * 50 + [1], [0] * 51, "group", clip=5)
    assert result.values[-1] == 5
    assert result.metrics["advantage/max_magnitude"] == 5
    assert advantages([0, 1], [0, 0], "group", clip=0.25).values.tolist() == [-0.25, 0.25]


def test_without_a_clip_advantages_are_as_they_are():
    one_of_many = ([0] * 50 + [1], [0] * 51, "group")
    assert advantages(*one_of_many, clip=None).values.max() == pytest.approx(
        7, abs=0.01
    )  # (1 - 1 / 51) / (std + 1e-4)
    assert advantages(*one_of_many, clip=5).values.max() == 5


def test_metrics_describe_rewards_and_kept_advantages():
    metrics = advantages(REWARDS, PROMPTS, "none").metrics
    kept = advantages(REWARDS, PROMPTS, "none").values
    assert metrics["reward/mean"] == pytest.approx(np.mean(REWARDS))
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.1, 0.9)
    assert metrics["group/size"] == 3.5
    assert metrics["advantage/std"] == pytest.approx(kept.std())


@given(batches(), st.sampled_from(MODES))
def test_kept_advantages_sum_to_zero_in_every_group(batch, std):
    rewards, prompt_ids = batch
    result = advantages(rewards, prompt_ids, std)
    assert np.isfinite(result.values).all()
    assert (result.values[~result.keep] == 0).all()
    assert result.metrics["group/dropped_samples"] == (~result.keep).sum()
    for prompt_id in np.unique(prompt_ids):
        mine = prompt_ids == prompt_id
        scored = rewards[mine & np.isfinite(rewards)]
        assert result.keep[mine & np.isfinite(rewards)].all() == (
            len(np.unique(scored)) > 1 or len(scored) == 0
        )
        assert abs(result.values[mine].astype(float).sum()) < 1e-4


@given(batches(), st.sampled_from(MODES), st.randoms(use_true_random=False))
def test_order_does_not_matter(batch, std, random):
    rewards, prompt_ids = batch
    order = list(range(len(rewards)))
    random.shuffle(order)
    here = advantages(rewards, prompt_ids, std)
    there = advantages(rewards[order], prompt_ids[order], std)
    assert there.keep.tolist() == here.keep[order].tolist()
    assert there.values == pytest.approx(here.values[order], abs=1e-5)


@given(batches(), st.sampled_from(["group", "none"]), st.integers(-64, 64))
def test_a_constant_on_all_rewards_of_a_prompt_changes_nothing(batch, std, shift):
    rewards, prompt_ids = batch
    shifts = np.where(prompt_ids == prompt_ids[0], shift, 0)
    here = advantages(rewards, prompt_ids, std)
    there = advantages(rewards + shifts, prompt_ids, std)
    assert there.keep.tolist() == here.keep.tolist()
    assert there.values == pytest.approx(here.values, abs=1e-4)


@given(batches(), st.sampled_from(MODES), st.integers(-64, 64))
def test_a_constant_on_all_rewards_changes_nothing(batch, std, shift):
    rewards, prompt_ids = batch
    assert advantages(rewards + shift, prompt_ids, std).values == pytest.approx(
        advantages(rewards, prompt_ids, std).values, abs=1e-4
    )


def test_prompt_ids_beyond_float_precision_stay_apart():
    result = advantages([0, 1, 10, 13], [2**53, 2**53, 2**53 + 1, 2**53 + 1], "none")
    assert result.values.tolist() == [-0.5, 0.5, -1.5, 1.5]


# Trimmed baselines


def trimmed_baseline(rewards, trim):
    result = advantages(rewards, [0] * len(rewards), "none", trim=trim)
    assert np.ptp(np.array(rewards) - result.values) < 1e-4
    return rewards[0] - result.values[0]


@pytest.mark.parametrize(
    ("trim", "expected"),
    [(0.0, 20.0), (0.19, 20.0), (0.2, 3.0), (0.39, 3.0), (0.4, 2.0), (np.nextafter(0.5, 0), 2.0)],
)
def test_the_trimmed_baseline_leaves_out_floor_of_its_share_at_either_end(trim, expected):
    # sorted: 0 1 2 6 91
    assert trimmed_baseline([91.0, 1.0, 0.0, 6.0, 2.0], trim) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("size", [2, 3, 4, 6, 14, 100])
def test_trimming_always_leaves_a_baseline(size):
    rewards = [float(n) for n in range(size)]
    assert trimmed_baseline(rewards, np.nextafter(0.5, 0)) == pytest.approx(
        (size - 1) / 2, abs=1e-4
    )


def test_trimming_counts_shares_that_binary_fractions_miss():
    assert 0.29 * 100 < 29
    rewards = np.array(
        [0.0] * 28 + [-1000.0] + [1.0] * 71
    )  # sorted: -1000 is the first, then 28 zeros
    assert trimmed_baseline(list(rewards), 0.29) == pytest.approx(1.0, abs=1e-4)


def test_each_group_is_trimmed_by_its_own_count_and_failed_scores_do_not_count():
    # Three scores and a quarter: nothing is trimmed. Four: one at either end.
    result = advantages(
        [0.0, NAN, 3.0, 9.0, 0.0, 1.0, 3.0, 100.0], [0] * 4 + [1] * 4, "none", trim=0.25
    )
    assert result.values.tolist() == [-4, 0, -1, 5, -2, -1, 1, 98]


@given(batches(), st.sampled_from(MODES))
def test_a_hair_of_trimming_is_none(batch, std):
    assert (
        advantages(*batch, std, trim=1e-6).values.tolist()
        == advantages(*batch, std).values.tolist()
    )


# Extremes


def test_only_the_extremes_of_each_group_are_kept():
    rewards = [3, 1, 4, 1.5, 9, 2, 6, 0, 1, 2, 0.5, 0.5]
    prompts = [0] * 7 + [1] * 3 + [2] * 2
    result = advantages(rewards, prompts, keep_extremes=2)
    # The best of the first group are 9 and 6, the worst 1 and 1.5; the second is smaller than four;
    # the third says nothing.
    assert result.keep.tolist() == [
        False,
        True,
        False,
        True,
        True,
        False,
        True,
        True,
        True,
        True,
        False,
        False,
    ]
    assert result.metrics["group/dropped_samples"] == 5
    assert result.metrics["group/zero_std_share"] == pytest.approx(1 / 3)
    whole = advantages(rewards, prompts)
    assert result.values.tolist() == np.where(result.keep, whole.values, 0).tolist()


def test_extremes_are_told_apart_beyond_the_clip():
    result = advantages([0, 10, 30, 20, 1, 2], [0] * 6, "none", clip=0.5, keep_extremes=1)
    assert result.keep.tolist() == [True, False, True, False, False, False]


def test_equal_extremes_go_by_position():
    assert advantages([1, 1, 0, 0, 1, 0], [0] * 6, keep_extremes=1).keep.tolist() == [
        False,
        False,
        True,
        False,
        True,
        False,
    ]


@given(batches(), st.integers(1, 4))
def test_extremes_keep_as_many_as_there_are_up_to_twice_their_number(batch, most):
    rewards, prompt_ids = batch
    whole = advantages(rewards, prompt_ids)
    few = advantages(rewards, prompt_ids, keep_extremes=most)
    for prompt_id in np.unique(prompt_ids):
        mine = prompt_ids == prompt_id
        assert few.keep[mine].sum() == min(whole.keep[mine].sum(), 2 * most)
        left_out = rewards[mine & whole.keep & ~few.keep]
        if len(left_out):
            kept = np.sort(rewards[mine & few.keep])
            assert kept[most - 1] <= left_out.min()
            assert kept[most] >= left_out.max()
