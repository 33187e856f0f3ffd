"""Advantages with statistics that run over the batches of a stage."""

import json

import numpy as np
import pytest
from advantage_cases import (
    MODES,
    NAN,
    OTHER,
    PROMPTS,
    REWARDS,
    advantages,
    batches,
    combine_advantages,
)
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.algorithms.advantages import PromptStatistics


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
        both = combine_advantages(
            {"a": REWARDS, "b": OTHER}, weights, PROMPTS, history, running=True
        )
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
        here = combine_advantages(rewards, weights, prompt_ids, kept, running=True)
        there = combine_advantages(rewards, weights, prompt_ids, restored, running=True)
        assert here.values.tobytes() == there.values.tobytes()
    assert restored.state_dict() == kept.state_dict()


def test_running_without_a_history_says_what_to_pass():
    with pytest.raises(ValueError, match="history=PromptStatistics"):
        advantages([0.0, 1.0], [7, 7], running=True)
