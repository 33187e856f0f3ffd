import math

from hypothesis import given
from hypothesis import strategies as st

from ebbflow.flow.windows import trained_steps
from ebbflow.recipe.stages import OnlineStage, Sampler, Window


@st.composite
def windows(draw, kinds=("all", "fixed", "random", "progressive")):
    """(window, denoising steps) that a recipe accepts."""
    steps = draw(st.integers(2, 40))
    start = draw(st.integers(0, steps - 2))
    window = Window(
        kind=draw(st.sampled_from(kinds)),
        start=start,
        size=draw(st.integers(1, max(1, steps - 1 - start))),
        limit=draw(st.floats(0.01, 1)),
        stride=draw(st.integers(1, 8)),
        steps_per_window=draw(st.integers(1, 5)),
    )
    if window.kind != "all" and window.start + window.size >= steps:
        window = window.model_copy(update={"kind": "all"})
    OnlineStage(sampler=Sampler(name="flow_sde", steps=steps), window=window)
    return window, steps


naturals = st.integers(0, 10**6)


@given(windows(), naturals, naturals)
def test_a_window_is_never_empty_and_never_holds_the_last_step(case, step, seed):
    window, steps = case
    trained = trained_steps(window, steps, step, seed)
    assert len(trained) > 0
    assert 0 <= trained[0] <= trained[-1] < steps - 1
    assert trained.step == 1
    assert window.kind == "all" or len(trained) == window.size
    assert window.kind == "all" or trained[0] >= window.start


@given(st.integers(2, 50), naturals)
def test_all_is_every_step_but_the_last(steps, step):
    assert list(trained_steps(Window(kind="all"), steps, step, seed=0)) == list(range(steps - 1))


@given(windows(["fixed"]), naturals)
def test_fixed_stays(case, step):
    window, steps = case
    if window.kind == "fixed":
        assert trained_steps(window, steps, step, 0) == range(window.start, window.start + window.size)


def starts(window, steps):
    """Where a moving window may start: from ``start`` in strides, within ``limit``, the last step left out."""
    end = min(math.ceil(window.limit * steps), steps - window.size)
    return [window.start, *range(window.start + window.stride, end, window.stride)]


@given(windows(["progressive"]))
def test_progressive_moves_by_its_stride_stays_its_time_and_starts_over(case):
    window, steps = case
    if window.kind != "progressive":
        return
    places, stay = starts(window, steps), window.steps_per_window
    seen = [trained_steps(window, steps, step, seed=7)[0] for step in range((2 * len(places) + 1) * stay)]
    assert seen == [place for place in [*places, *places, places[0]] for _ in range(stay)]


def test_mixgrpo_on_six_steps():
    window = Window(kind="progressive", size=3, steps_per_window=10)
    seen = [trained_steps(window, 6, step, seed=0) for step in (0, 9, 10, 20, 29, 30)]
    assert seen == [range(3), range(3), range(1, 4), range(2, 5), range(2, 5), range(3)]


@given(windows(["random"]), naturals)
def test_random_covers_its_range_and_nothing_else(case, seed):
    window, steps = case
    if window.kind == "random":
        places = starts(window, steps)
        seen = {trained_steps(window, steps, step, seed)[0] for step in range(20 * len(places) + 20)}
        assert seen == set(places)


def test_random_depends_on_the_seed_and_the_optimisation_step_alone():
    window = Window(kind="random", size=2, limit=1)

    def sequence(seed, order):
        return {step: trained_steps(window, 20, step, seed) for step in order}

    forward = sequence(4, range(50))
    assert sequence(4, reversed(range(50))) == forward
    assert sequence(5, range(50)) != forward
    assert len(set(forward.values())) > 10
