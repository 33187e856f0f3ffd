import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.algorithms.advantages import PromptStatistics, compute_advantages, find_varied_prompts
from ebbflow.recipe.choices import AdvantagesConfig
from ebbflow.recipe.rewards import MAX_SCORE, MAX_WEIGHT

MODES = ["global", "group", "none"]
NAN = float("nan")


def combined(rewards, weights, prompt_ids, history=None, scored=None, **keys):
    """Advantages from the scores of several rewards."""
    scores = {name: np.array(values, np.float64) for name, values in rewards.items()}
    config = AdvantagesConfig(**{"std": "group", "clip": 1e6} | keys)
    return compute_advantages(
        scores, weights, np.array(prompt_ids, np.int64), config, history, scored
    )


def advantages(rewards, prompt_ids, std="group", **keys):
    """Advantages from the scores of one."""
    return combined({"only": rewards}, {"only": 1.0}, prompt_ids, std=std, **keys)


REWARDS = [0.1, 0.5, 0.3, 0.9, 0.2, 0.4, 0.8]
PROMPTS = [4, 4, 4, 7, 7, 7, 7]


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
        result = combined(
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


# Several rewards

OTHER = [5.0, -1.0, 2.0, 0.0, 0.0, 3.0, 1.0]


def z(rewards):
    """By group, of REWARDS' prompts."""
    groups = np.split(np.array(rewards, np.float64), [3])
    return np.concatenate([(group - group.mean()) / (group.std(ddof=1) + 1e-4) for group in groups])


def test_per_reward_normalises_each_and_adds_them_with_the_weights():
    result = combined(
        {"a": REWARDS, "b": OTHER}, {"a": 3.0, "b": 1.0}, PROMPTS, combine="per_reward"
    )
    assert result.values == pytest.approx(3 * z(REWARDS) + z(OTHER), abs=1e-6)


def test_sum_normalises_the_weighted_sum_once():
    result = combined({"a": REWARDS, "b": OTHER}, {"a": 3.0, "b": 0.5}, PROMPTS, combine="sum")
    assert result.values == pytest.approx(
        z(3 * np.array(REWARDS) + 0.5 * np.array(OTHER)), abs=1e-6
    )


@pytest.mark.parametrize("combine", ["sum", "per_reward"])
def test_reward_metrics_are_of_the_weighted_sum(combine):
    total = 3 * np.array(REWARDS) + 0.5 * np.array(OTHER)
    metrics = combined(
        {"a": REWARDS, "b": OTHER}, {"a": 3.0, "b": 0.5}, PROMPTS, combine=combine
    ).metrics
    found = [metrics[f"reward/{name}"] for name in ("mean", "std", "min", "max")]
    assert found == pytest.approx([total.mean(), total.std(), total.min(), total.max()])


@pytest.mark.parametrize("std", MODES)
@pytest.mark.parametrize("weight", [1.0, 0.3, 7.0])
def test_with_one_reward_the_combinations_agree_but_for_its_weight(std, weight):
    once = advantages(REWARDS, PROMPTS, std, combine="sum")
    each = combined({"only": REWARDS}, {"only": weight}, PROMPTS, std=std, combine="per_reward")
    assert each.values == pytest.approx(weight * once.values, rel=1e-6)
    if weight == 1:
        assert each.values.tolist() == once.values.tolist()


def test_the_scale_of_a_reward_decides_its_share_of_a_sum_and_of_nothing_else():
    def alignment(combine, scale):
        result = combined(
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
    holes = combined(
        {"a": [*REWARDS, 0.3], "b": [*OTHER, NAN]},
        {"a": 1.0, "b": 2.0},
        [*PROMPTS, 7],
        combine=combine,
    )
    whole = combined({"a": REWARDS, "b": OTHER}, {"a": 1.0, "b": 2.0}, PROMPTS, combine=combine)
    assert holes.keep.tolist() == [True] * 7 + [False]
    assert holes.values.tolist() == [*whole.values, 0]
    assert holes.metrics["reward/scored_share"] == 7 / 8


def test_a_group_is_uninformative_only_when_every_reward_is():
    first = [0.5, 0.5, 0.1, 0.1, 0.4, 0.6]
    second = [2, 2, 1, 3, 7, 7]
    result = combined({"a": first, "b": second}, {"a": 1.0, "b": 1.0}, [0, 0, 1, 1, 2, 2])
    assert result.keep.tolist() == [False, False, True, True, True, True]
    # The reward without a spread adds nothing.
    assert result.values[2:] == pytest.approx(np.sqrt(0.5) * np.array([-1, 1, -1, 1]), abs=1e-3)
    assert result.metrics["group/zero_std_share"] == pytest.approx(1 / 3)


def test_a_sum_without_spread_is_uninformative_even_if_its_parts_vary():
    opposed = {"a": [0.0, 1.0], "b": [1.0, 0.0]}, {"a": 1.0, "b": 1.0}
    assert not combined(*opposed, [0, 0], combine="sum").keep.any()
    assert combined(*opposed, [0, 0], combine="per_reward").keep.all()


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


# Running statistics


@given(batches(), st.sampled_from(MODES))
def test_the_first_batch_of_a_history_is_an_ordinary_one(batch, std):
    first = advantages(*batch, std, running=True, history=PromptStatistics())
    ordinary = advantages(*batch, std)
    assert first.keep.tolist() == ordinary.keep.tolist()
    assert first.values.tolist() == ordinary.values.tolist()


@given(batches(), st.lists(st.integers(0, 24), max_size=4), st.sampled_from(["group", "none"]))
def test_a_history_in_parts_is_the_statistics_of_the_whole(batch, cuts, std):
    rewards, prompt_ids = batch
    history = PromptStatistics()
    whole = advantages(rewards, prompt_ids, std)
    for part in np.split(
        np.arange(len(rewards)), sorted(min(cut, len(rewards) - 1) for cut in cuts)
    ):
        if len(part):
            last = part
            result = advantages(rewards[part], prompt_ids[part], std, running=True, history=history)
    assert result.keep.tolist() == whole.keep[last].tolist()
    assert result.values == pytest.approx(whole.values[last], rel=1e-4, abs=1e-4)


def test_running_baseline_and_deviation_by_hand():
    history = PromptStatistics()
    advantages([0.0, 1.0], [7, 7], running=True, history=history)
    result = advantages([5.0, 2.0, 2.0], [8, 7, 7], running=True, history=history)
    seen = np.array([0.0, 1.0, 2.0, 2.0])
    expected = (2 - seen.mean()) / (seen.std(ddof=1) + 1e-4)
    # Prompt 8 is new and alone; prompt 7's equal rewards now differ from what it had.
    assert result.keep.tolist() == [False, True, True]
    assert result.values == pytest.approx([0, expected, expected], abs=1e-6)


def test_a_group_of_one_speaks_when_its_prompt_has_a_past():
    history = PromptStatistics()
    assert not advantages([1.0], [7], running=True, history=history).keep.any()
    result = advantages([2.0], [7], running=True, history=history)
    assert result.values == pytest.approx([0.5 / (np.sqrt(0.5) + 1e-4)])
    assert result.metrics["group/zero_std_share"] == 0


def test_equal_rewards_all_along_stay_silent():
    history = PromptStatistics()
    for _ in range(5):
        assert not advantages([0.1] * 3, [7] * 3, running=True, history=history).keep.any()


def test_a_known_prompt_without_scores_now_says_nothing_and_forgets_nothing():
    history = PromptStatistics()
    advantages([0.0, 1.0], [7, 7], running=True, history=history)
    before = history.state_dict()
    result = advantages([NAN, NAN], [7, 7], running=True, history=history)
    assert result.metrics["group/zero_std_share"] == 1
    assert history.state_dict() == before


def test_running_leaves_the_global_deviation_to_the_batch():
    history = PromptStatistics()
    advantages([0.0, 100.0], [7, 7], "global", running=True, history=history)
    result = advantages([50.0, 52.0], [7, 7], "global", running=True, history=history)
    assert result.values == pytest.approx(np.array([-0.5, 1.5]) / (np.sqrt(2) + 1e-4), rel=1e-6)


def test_every_reward_has_its_own_running_statistics():
    weights = {"a": 1.0, "b": 3.0}
    history = PromptStatistics()
    alone = {name: PromptStatistics() for name in weights}
    for _ in range(2):
        both = combined({"a": REWARDS, "b": OTHER}, weights, PROMPTS, history, running=True)
        a = advantages(REWARDS, PROMPTS, running=True, history=alone["a"])
        b = advantages(OTHER, PROMPTS, running=True, history=alone["b"])
        assert both.values == pytest.approx(a.values + 3 * b.values, abs=1e-6)


def test_a_history_survives_json_exactly():
    rng = np.random.default_rng(0)
    steps = [
        ({"a": rng.normal(size=6), "b": rng.normal(size=6)}, [2**62 + 1, 3, 3, 3, 2**62 + 1, 5])
        for _ in range(4)
    ]
    weights = {"a": 1.0, "b": 1.0}
    kept = PromptStatistics()
    restored = PromptStatistics()
    for rewards, prompt_ids in steps:
        restored = PromptStatistics.from_state_dict(json.loads(json.dumps(restored.state_dict())))
        here = combined(rewards, weights, prompt_ids, kept, running=True)
        there = combined(rewards, weights, prompt_ids, restored, running=True)
        assert here.values.tobytes() == there.values.tobytes()
    assert restored.state_dict() == kept.state_dict()


def test_running_without_a_history_says_what_to_pass():
    with pytest.raises(ValueError, match="history=PromptStatistics"):
        advantages([0.0, 1.0], [7, 7], running=True)


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
    found = combined(OF_SETS, weights, OF_PROMPTS, PromptStatistics(), scored=HAS_A_REWARD, **keys)
    assert found.keep.tolist() == HAS_A_REWARD.tolist()
    for rows, names in ((slice(0, 2), ("spells", "always")), (slice(2, 4), ("pleases", "always"))):
        alone = {name: OF_SETS[name][rows] for name in names}
        if std == "global":  # of the reward that all have, the std is over both prompts
            alone.pop("always")
            shared = combined(
                {"always": OF_SETS["always"][:4]},
                {"always": 1.0},
                OF_PROMPTS[:4],
                PromptStatistics(),
                **keys,
            )
        wanted = combined(
            alone,
            {name: weights[name] for name in alone},
            OF_PROMPTS[rows],
            PromptStatistics(),
            **keys,
        )
        extra = shared.values[rows] if std == "global" else 0.0
        assert found.values[rows] == pytest.approx(wanted.values + extra, abs=1e-6)


def test_without_word_of_what_is_scored_a_missing_score_masks_the_sample():
    assert not combined(OF_SETS, dict.fromkeys(OF_SETS, 1.0), OF_PROMPTS).keep.any()


def test_a_prompt_varies_by_the_rewards_that_it_has():
    scores = {name: np.array(values) for name, values in OF_SETS.items()}
    for combine in ("sum", "per_reward"):
        config = AdvantagesConfig(combine=combine)
        assert find_varied_prompts(
            scores, dict.fromkeys(scores, 1.0), np.array(OF_PROMPTS), config, HAS_A_REWARD
        ) == [1, 2]
