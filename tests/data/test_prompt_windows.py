"""Which steps are encoded together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.data import prompt_windows
from ebbflow.data.prompt_windows import split_into_windows
from ebbflow.models.encoding import PROMPTS_PER_FILE


def test_a_window_has_a_file_for_each_of_eight_gpus() -> None:
    assert prompt_windows.PROMPTS_PER_WINDOW == 8 * PROMPTS_PER_FILE


def test_a_stage_with_few_prompts_is_one_window() -> None:
    steps = [[number % 100, 100 + number % 7] for number in range(100_000)]
    assert split_into_windows(steps) == [range(100_000)]
    assert split_into_windows([]) == []


def test_a_step_with_more_prompts_than_a_window_is_one_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_windows, "PROMPTS_PER_WINDOW", 3)
    steps = [[0, 1], [1, 2], [3, 4, 5, 6, 7], [0], [0, 1], [2, 3]]
    assert split_into_windows(steps) == [range(2), range(2, 3), range(3, 5), range(5, 6)]


@given(
    st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=4, unique=True), max_size=30),
    st.integers(4, 12),
)
def test_windows_are_the_longest_runs_that_fit(steps: list[list[int]], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_windows, "PROMPTS_PER_WINDOW", size)
        windows = split_into_windows(steps)
    assert [step for window in windows for step in window] == list(range(len(steps)))
    for window in windows:
        assert len({prompt for step in window for prompt in steps[step]}) <= size
        if window.stop < len(steps):
            longer = range(window.start, window.stop + 1)
            assert len({prompt for step in longer for prompt in steps[step]}) > size
