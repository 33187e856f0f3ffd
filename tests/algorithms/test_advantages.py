import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.algorithms.advantages import compute_advantages
from ebbflow.recipe.stages import Advantages

MODES = ["global", "group", "none"]
NAN = float("nan")


def advantages(rewards, prompt_ids, std="group", clip=1e6):
    return compute_advantages(np.array(rewards, np.float64), np.array(prompt_ids, np.int64), Advantages(std=std, clip=clip))


REWARDS, PROMPTS = [0.1, 0.5, 0.3, 0.9, 0.2, 0.4, 0.8], [4, 4, 4, 7, 7, 7, 7]


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
def test_the_three_divisors(std, expected):
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
@pytest.mark.parametrize("failed", [NAN, float("inf"), float("-inf")])
def test_failed_scores_are_masked_and_change_nothing_else(std, failed):
    whole = advantages(REWARDS, PROMPTS, std)
    holes = advantages([failed, *REWARDS, failed], [4, *PROMPTS, 7], std)
    assert holes.keep.tolist() == [False, *whole.keep, False]
    assert holes.values.tolist() == [0, *whole.values, 0]
    assert holes.metrics["reward/scored_share"] == pytest.approx(7 / 9)
    for name in ("reward/mean", "reward/min", "reward/max", "reward/std", "group/zero_std_share", "advantage/std"):
        assert holes.metrics[name] == whole.metrics[name]


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
    # Both prompts have mean 0, so the divisor is REWARDS / advantages; repeating rewards over timesteps would shrink it.
    result = advantages([-1, 1, -3, 3], [0, 0, 1, 1], "global")
    divisors = np.array([-1, 1, -3, 3]) / result.values
    assert divisors == pytest.approx([np.sqrt(20 / 3) + 1e-4] * 4, rel=1e-6)


def test_clip():
    result = advantages([0] * 50 + [1], [0] * 51, "group", clip=5)
    assert result.values[-1] == 5
    assert result.metrics["advantage/max_magnitude"] == 5
    assert advantages([0, 1], [0, 0], "group", clip=0.25).values.tolist() == [-0.25, 0.25]


def test_metrics_describe_rewards_and_kept_advantages():
    metrics = advantages(REWARDS, PROMPTS, "none").metrics
    kept = advantages(REWARDS, PROMPTS, "none").values
    assert metrics["reward/mean"] == pytest.approx(np.mean(REWARDS))
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.1, 0.9)
    assert metrics["group/size"] == 3.5
    assert metrics["advantage/std"] == pytest.approx(kept.std())


@st.composite
def batches(draw):
    """Rewards on a grid of 1/64 (exact in float), NaN among them, with their prompt ids."""
    size = draw(st.integers(1, 24))
    reward = st.one_of(st.integers(-640, 640).map(lambda n: n / 64), st.just(NAN))
    rewards = draw(st.lists(reward, min_size=size, max_size=size))
    prompt_ids = draw(
        st.lists(st.integers(0, 2**62), min_size=1, max_size=4).flatmap(
            lambda ids: st.lists(st.sampled_from(ids), min_size=size, max_size=size)
        )
    )
    return np.array(rewards), np.array(prompt_ids)


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
        assert result.keep[mine & np.isfinite(rewards)].all() == (len(np.unique(scored)) > 1 or len(scored) == 0)
        assert abs(result.values[mine].astype(float).sum()) < 1e-4


@given(batches(), st.sampled_from(MODES), st.randoms(use_true_random=False))
def test_order_does_not_matter(batch, std, random):
    rewards, prompt_ids = batch
    order = list(range(len(rewards)))
    random.shuffle(order)
    here, there = advantages(rewards, prompt_ids, std), advantages(rewards[order], prompt_ids[order], std)
    assert there.keep.tolist() == here.keep[order].tolist()
    assert there.values == pytest.approx(here.values[order], abs=1e-5)


@given(batches(), st.sampled_from(["group", "none"]), st.integers(-64, 64))
def test_a_constant_on_all_rewards_of_a_prompt_changes_nothing(batch, std, shift):
    rewards, prompt_ids = batch
    shifts = np.where(prompt_ids == prompt_ids[0], shift, 0)
    here, there = advantages(rewards, prompt_ids, std), advantages(rewards + shifts, prompt_ids, std)
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
