"""Samples are split into equal passes, in rollouts and in updates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.recipe.passes import choose_pass_size, split_into_equal_passes


@given(st.integers(1, 200), st.integers(1, 100))
def test_passes_cover_all_samples_and_differ_by_one_at_most(count, max_samples):
    parts = split_into_equal_passes(count, max_samples)
    rows = [row for part in parts for row in range(count)[part]]
    sizes = [part.stop - part.start for part in parts]
    assert rows == list(range(count))
    assert max(sizes) <= max_samples
    assert max(sizes) - min(sizes) <= 1
    assert (len(parts) - 1) * max_samples < count, "no more passes than needed"


@given(st.integers(1, 50), st.integers(1, 100))
def test_a_pass_has_whole_groups_or_a_part_of_one(group_size, micro_batch):
    size = choose_pass_size(group_size, micro_batch)
    assert 1 <= size <= micro_batch
    if micro_batch >= group_size:
        assert size % group_size == 0
    elif group_size % micro_batch == 0:
        assert size == micro_batch


@pytest.mark.parametrize(
    ("group_size", "micro_batch", "expected"), [(24, 9, 8), (4, 9, 8), (4, 64, 64), (7, 3, 3)]
)
def test_the_size_of_a_pass(group_size, micro_batch, expected):
    assert choose_pass_size(group_size, micro_batch) == expected
