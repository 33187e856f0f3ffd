import math
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.flow.windows import Plan, plan_steps
from ebbflow.recipe.choices import WINDOW_KEYS, SamplerConfig, WindowConfig
from ebbflow.recipe.stages import OnlineStageConfig

KINDS = tuple(WINDOW_KEYS)
CONTIGUOUS = ("fixed", "random", "progressive", "decaying")


@st.composite
def windows(draw, kinds=KINDS):
    """(window, denoising steps) that a recipe accepts."""
    kind = draw(st.sampled_from(kinds))
    steps = draw(st.integers(2, 40))
    limit = draw(st.floats(0.01, 1))
    before = steps - 1 if kind == "fixed" else min(steps - 1, math.ceil(limit * steps))
    start = draw(st.integers(0, before - 1))
    keys = {
        "start": start,
        "size": draw(st.integers(1, max(1, steps - 1 - start))),
        "limit": limit,
        "stride": draw(st.integers(1, 8)),
        "steps_per_window": draw(st.integers(1, 5)),
        "decay": draw(st.floats(0, 2)),
        "decay_after": draw(st.none() | st.integers(0, 20)),
        "roll_over": draw(st.booleans()),
        "share": draw(st.floats(0.01, 1)),
        "tail": draw(st.none() | st.floats(0.01, 0.99)),
    }
    window = WindowConfig(kind=kind, **{key: keys[key] for key in WINDOW_KEYS[kind]})
    OnlineStageConfig(sampler=SamplerConfig(name="flow_sde", steps=steps), window=window)
    return window, steps


naturals = st.integers(0, 10**6)


@given(windows(), naturals, naturals)
def test_a_plan_is_never_empty_and_never_holds_the_last_step(case, step, seed):
    window, steps = case
    made = plan_steps(window, steps, step, seed)
    assert len(made.trained) > 0
    assert list(made.stochastic) == sorted(set(made.stochastic))
    assert list(made.trained) == sorted(set(made.trained))
    assert set(made.trained) <= set(made.stochastic)
    assert 0 <= made.stochastic[0] <= made.stochastic[-1] < steps - 1
    assert all(isinstance(start, int) for start in (*made.stochastic, *made.trained))


@given(windows(CONTIGUOUS), naturals, naturals)
def test_a_window_has_its_size_without_gaps_and_all_of_it_is_trained(case, step, seed):
    window, steps = case
    made = plan_steps(window, steps, step, seed)
    assert made.trained == made.stochastic
    assert made.trained == tuple(range(made.trained[0], made.trained[0] + window.size))
    assert made.trained[0] >= window.start


@given(windows(), naturals, naturals)
def test_the_tail_is_the_recipes(case, step, seed):
    window, steps = case
    assert plan_steps(window, steps, step, seed).tail == window.tail


@given(windows(), naturals, naturals)
def test_the_same_optimisation_step_and_seed_draw_the_same_plan(case, step, seed):
    window, steps = case
    first = plan_steps(window, steps, step, seed)
    plan_steps(window, steps, step + 1, seed)
    assert plan_steps(window, steps, step, seed) == first


@given(st.integers(2, 50), naturals)
def test_all_is_every_step_but_the_last(steps, step):
    every = tuple(range(steps - 1))
    assert plan_steps(WindowConfig(kind="all"), steps, step, seed=0) == Plan(every, every)


@given(windows(["fixed"]), naturals)
def test_fixed_window_starts_at_the_same_step_always(case, step):
    window, steps = case
    assert plan_steps(window, steps, step, 0).trained[0] == window.start


def starts(window, steps):
    """Where a moving window may start: from ``start`` in strides, within ``limit``, the last step
    left out.
    """
    end = min(math.ceil(window.limit * steps), steps - window.size)
    return [window.start, *range(window.start + window.stride, end, window.stride)]


def visited(window, steps, count):
    return [plan_steps(window, steps, step, seed=7).trained[0] for step in range(count)]


def stays(window, steps, count):
    """(start, optimisation steps it stays) in the order of visits."""
    return [(start, len(list(visits))) for start, visits in groupby(visited(window, steps, count))]


@given(windows(["progressive"]))
def test_progressive_moves_by_its_stride_and_stays_its_time(case):
    window, steps = case
    places = starts(window, steps)
    stay = window.steps_per_window
    then = [*places, places[0]] if window.roll_over else [places[-1]] * (len(places) + 1)
    seen = visited(window, steps, (2 * len(places) + 1) * stay)
    assert seen == [start for start in [*places, *then] for _ in range(stay)]


def test_mixgrpo_on_six_steps():
    window = WindowConfig(kind="progressive", size=3, steps_per_window=10)
    seen = [plan_steps(window, 6, step, seed=0).trained for step in (0, 9, 10, 20, 29, 30)]
    assert seen == [(0, 1, 2), (0, 1, 2), (1, 2, 3), (2, 3, 4), (2, 3, 4), (0, 1, 2)]


def test_without_roll_over_the_last_window_stays_for_good():
    window = WindowConfig(kind="progressive", size=3, steps_per_window=10, roll_over=False)
    assert [
        plan_steps(window, 6, step, seed=0).trained[0] for step in (0, 10, 20, 30, 31, 10**6)
    ] == [
        0,
        1,
        2,
        2,
        2,
        2,
    ]


def test_decaying_on_the_published_25_steps():
    # 25 exp(-.1 k) for k = 1 ... 7: 22.6, 20.5, 18.5, 16.8, 15.2, 13.7, 12.4.
    window = WindowConfig(kind="decaying", size=4, limit=1, steps_per_window=25)
    expected = [(start, 25) for start in range(14)]
    expected += [(14, 23), (15, 21), (16, 19), (17, 17), (18, 16), (19, 14), (20, 13)]
    round_trip = sum(stay for _, stay in expected)
    assert round_trip == 473
    assert stays(window, 25, round_trip) == expected
    assert stays(window, 25, 2 * round_trip) == 2 * expected
    for_good = window.model_copy(update={"roll_over": False})
    assert stays(for_good, 25, round_trip + 100) == [*expected[:-1], (20, 113)]


@pytest.mark.parametrize(("steps", "half"), [(10, 5), (11, 6), (25, 13)])
def test_a_decay_begins_in_the_middle_unless_told_otherwise(steps, half):
    window = WindowConfig(kind="decaying", size=1, steps_per_window=100)
    seen = stays(window, steps, 100 * steps)[: steps - 1]
    assert [start for start, stay in seen if stay == 100] == list(range(half + 1))
    assert [stay for _, stay in seen[half + 1 :]] == [
        math.ceil(100 * math.exp(-0.1 * k)) for k in range(1, steps - 1 - half)
    ]
    for start, first in ((half, half + 1), (0, 1)):
        changed = window.model_copy(update={"decay_after": start})
        assert (
            next(start for start, stay in stays(changed, steps, 100 * steps) if stay < 100) == first
        )


@given(windows(["decaying"]))
def test_without_decay_decaying_is_progressive(case):
    window, steps = case
    window = window.model_copy(update={"decay": 0.0})
    assert visited(window, steps, 60) == visited(
        window.model_copy(update={"kind": "progressive"}), steps, 60
    )


def test_however_fast_it_decays_every_window_has_one_optimisation_step():
    window = WindowConfig(
        kind="decaying", size=1, limit=1, steps_per_window=25, decay=1e4, decay_after=0
    )
    assert stays(window, 6, 29) == [(0, 25), (1, 1), (2, 1), (3, 1), (4, 1)]


@given(windows(["random"]), naturals)
def test_random_covers_its_range_and_nothing_else(case, seed):
    window, steps = case
    places = starts(window, steps)
    seen = {
        plan_steps(window, steps, step, seed).trained[0] for step in range(20 * len(places) + 20)
    }
    assert seen == set(places)


@given(windows(["share"]), naturals, naturals)
def test_share_is_stochastic_everywhere_and_trains_its_share(case, step, seed):
    window, steps = case
    made = plan_steps(window, steps, step, seed)
    assert made.stochastic == tuple(range(steps - 1))
    assert len(made.trained) == max(1, int(window.share * (steps - 1)))


def test_share_trains_every_step_equally_often():
    draws = 3000
    count = 10
    share = 0.6
    plans = [
        plan_steps(WindowConfig(kind="share", share=share), count + 1, step, seed=2)
        for step in range(draws)
    ]
    often = np.bincount([start for made in plans for start in made.trained], minlength=count)
    assert len(often) == count
    assert np.abs(often - share * draws).max() < 4 * math.sqrt(draws * share * (1 - share))


@pytest.mark.parametrize("kind", ["random", "share"])
def test_a_draw_depends_on_the_seed_and_the_optimisation_step_alone(kind):
    window = WindowConfig(
        kind=kind, **{"random": {"size": 2, "limit": 1}, "share": {"share": 0.3}}[kind]
    )

    def sequence(seed, order):
        return {step: plan_steps(window, 20, step, seed).trained for step in order}

    forward = sequence(4, range(50))
    assert sequence(4, reversed(range(50))) == forward
    assert sequence(5, range(50)) != forward
    assert len(set(forward.values())) > 10
