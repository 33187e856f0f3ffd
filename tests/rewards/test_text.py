import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_cases import as_prompt

from ebbflow.rewards.text import exact, judge_readings, text_similarity


@pytest.mark.parametrize(
    ("read", "target", "score"),
    [
        ("WXYZ", "WXYZ", 1.0),
        ("w x\tyz", "WXYZ", 1.0),
        ("WXY", "WXYZ", 0.75),
        ("WAYZ", "WXYZ", 0.75),
        ("XWYZ", "WXYZ", 0.5),
        ("", "WXYZ", 0.0),
        ("WXYZ and much more", "WXYZ", 0.0),
    ],
)
def test_similarity_follows_the_convention(read, target, score):
    assert text_similarity(read, target) == score
    assert exact(read, target) == float(score == 1.0)


@given(read=st.text(max_size=12), target=st.text(min_size=1, max_size=12).filter(str.strip))
def test_similarity_is_a_share_and_one_only_for_equal_texts(read, target):
    score = text_similarity(read, target)
    assert 0 <= score <= 1
    assert (score == 1) == bool(exact(read, target))


def test_a_blank_target_is_an_error():
    with pytest.raises(ValueError, match="blank"):
        text_similarity("A", " ")


def test_failed_readings_and_missing_targets_are_nan_with_a_reason():
    prompts = [as_prompt(0, "AB"), as_prompt(1, "AB"), as_prompt(2, None)]
    result = judge_readings(["ab", None, "ab"], prompts, "hit", {1: "broken"})
    assert np.array_equal(result.values, [1, np.nan, np.nan], equal_nan=True)
    assert np.array_equal(result.metrics["hit"], [1, np.nan, np.nan], equal_nan=True)
    assert result.failures[1] == "broken"
    assert "quote it" in result.failures[2]
