from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.data.sampling import SamplingError, sample_prompts


@given(st.integers(1, 30), st.data())
def test_an_epoch_shows_no_prompt_twice(make_prompts, size, data):
    prompts = make_prompts(size)
    count = data.draw(st.integers(1, size))
    epoch = data.draw(st.integers(0, 5))
    seed = data.draw(st.integers(0, 2**62))
    steps = size // count
    batches = [sample_prompts(prompts, count, epoch * steps + step, seed) for step in range(steps)]
    assert [len(batch) for batch in batches] == [count] * steps
    seen = Counter(prompt.prompt_id for batch in batches for prompt in batch)
    assert set(seen.values()) == {1}
    assert len(seen) >= size - count + 1


def test_every_epoch_has_its_own_order():
    prompts = list(range(40))

    def epoch(number, seed=0):
        return tuple(
            item
            for step in range(5)
            for item in sample_prompts(prompts, 8, 5 * number + step, seed)
        )

    assert len({epoch(0), epoch(1), epoch(2), epoch(0, seed=1), tuple(prompts)}) == 5
    assert sorted(epoch(3)) == prompts


def test_prompts_left_over_in_one_epoch_have_their_turn_in_others():
    seen = Counter(
        item for step in range(300) for item in sample_prompts(list(range(10)), 4, step, seed=0)
    )
    assert len(seen) == 10
    assert min(seen.values()) > 80


def test_a_step_is_a_function_of_its_arguments():
    prompts = list(range(20))
    forward = [sample_prompts(prompts, 3, step, 5) for step in range(30)]
    assert [sample_prompts(prompts, 3, step, 5) for step in reversed(range(30))] == forward[::-1]


def test_sampling_more_prompts_than_exist_is_an_error():
    with pytest.raises(
        SamplingError,
        match=r"needs 4 different prompts and the training split has 3; lower .* or add prompts",
    ):
        sample_prompts(list(range(3)), 4, 0, 0)
