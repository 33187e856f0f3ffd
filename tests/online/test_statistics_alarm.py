"""The alarm on image statistics: it rings once per statistic, beyond its limit and beyond
chance."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from ebbflow.evaluation.image_statistics import STATISTICS, create_missing_statistics
from ebbflow.online.loop import run_online_stage
from ebbflow.online.statistics_alarm import watch_statistics
from ebbflow.online.workers import open_local_workers
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training.policy import Policy
from ebbflow.training.stage_loop import StageState
from ebbflow.training.update import PolicyUpdater

DRAWS = np.random.default_rng(0).normal(size=200)
DRAWS = (DRAWS - DRAWS.mean()) / DRAWS.std()
CHANCE = 0.2
"""Two standard errors of the difference between two means of 200."""


def step(statistics, prompts=None, size=None):
    """A step's batch; without ``prompts``, each sample has a prompt of its own."""
    count = len(next(iter(statistics.values())))
    prompt_ids = (
        np.arange(count) if prompts is None else np.repeat(np.arange(prompts), count // prompts)
    )
    return SimpleNamespace(statistics=statistics, prompt_ids=prompt_ids, size=size)


@pytest.fixture
def ctx(make_recipe):
    def context(**online):
        return StageContext(make_recipe(online={"statistics_alarm": 1.0} | online), 0, 0)

    return context


@pytest.mark.filterwarnings("ignore:brightness of the images")
@pytest.mark.parametrize(
    ("shift", "rings"), [(0.0, False), (1.1, False), (1.3, True), (-1.1, False), (-1.3, True)]
)
def test_it_rings_beyond_its_limit_and_chance_in_either_direction(ctx, shift, rings):
    state = StageState()
    first = watch_statistics(ctx(), state, step({"brightness": 0.5 + 0.1 * DRAWS}))
    assert first == {
        "statistic/brightness": pytest.approx(0.5),
        "statistic_shift/brightness": 0.0,
        "alarm/statistics": 0.0,
    }
    metrics = watch_statistics(ctx(), state, step({"brightness": 0.5 + 0.1 * (DRAWS + shift)}))
    assert metrics["statistic_shift/brightness"] == pytest.approx(shift)
    assert metrics["alarm/statistics"] == rings
    assert len(state.alarms) == rings


def test_it_warns_once_of_each_statistic_and_names_numbers_and_the_key(ctx):
    state = StageState()
    start = {"brightness": 0.5 + 0.1 * DRAWS, "entropy": 0.5 + 0.1 * DRAWS}
    watch_statistics(ctx(), state, step(start))
    state.step = 7
    with pytest.warns(
        UserWarning,
        match=(
            r"brightness .* from 0.5 to 0.8, \+3 standard deviations.*statistics_alarm = 1, in"
            r" step 7"
        ),
    ):
        watch_statistics(ctx(), state, step(start | {"brightness": 0.8 + 0.1 * DRAWS}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics = watch_statistics(ctx(), state, step(start | {"brightness": 0.8 + 0.1 * DRAWS}))
    assert metrics["alarm/statistics"] == 1
    assert len(state.alarms) == 1
    with pytest.warns(UserWarning, match="entropy"):
        watch_statistics(ctx(), state, step(start | {"entropy": 0.2 + 0.1 * DRAWS}))


def test_a_checkpoint_keeps_what_it_compares_with(ctx):
    state = StageState()
    watch_statistics(ctx(), state, step({"brightness": 0.5 + 0.1 * DRAWS}))
    resumed = StageState()
    resumed.load_state_dict(state.state_dict())
    with pytest.warns(UserWarning, match="brightness"):
        watch_statistics(ctx(), resumed, step({"brightness": 0.9 + 0.1 * DRAWS}))


def test_it_can_be_switched_off_and_images_that_nobody_saw_do_not_count(ctx):
    state = StageState()
    assert watch_statistics(ctx(), state, step(create_missing_statistics(4))) == {
        "alarm/statistics": 0.0
    }
    watch_statistics(ctx(statistics_alarm=None), state, step({"brightness": 0.5 + 0.1 * DRAWS}))
    lost = np.where(np.arange(200) < 20, np.nan, 0.9 + 0.1 * DRAWS)
    metrics = watch_statistics(ctx(statistics_alarm=None), state, step({"brightness": lost}))
    assert metrics["statistic_shift/brightness"] == pytest.approx(4, abs=0.3)
    assert state.alarms == []


@pytest.mark.parametrize("prompts", [2, 3, 8, 64])
@pytest.mark.parametrize("alike", [0.0, 0.99], ids=["independent samples", "samples of one noise"])
@pytest.mark.filterwarnings("ignore:brightness of the images")
def test_chance_alone_rarely_exceeds_chance_however_few_prompts_there_are(ctx, prompts, alike):
    """Counted as independent, samples of one initial noise rang in most steps."""
    generator = np.random.default_rng(0)
    watched = ctx(statistics_alarm=1e-9)

    def images(shift=0.0):
        of_prompt = generator.normal(size=(prompts, 1))
        of_sample = generator.normal(size=(prompts, 4))
        values = np.sqrt(alike) * of_prompt + np.sqrt(1 - alike) * of_sample
        return step({"brightness": 10 + shift + values.ravel()}, prompts)

    rings = []
    for _ in range(400):
        state = StageState()
        watch_statistics(watched, state, images())
        rings.append(watch_statistics(watched, state, images())["alarm/statistics"])
    assert 0.02 < np.mean(rings) < 0.08
    watch_statistics(watched, state := StageState(), images())
    assert watch_statistics(watched, state, images(shift=40.0))["alarm/statistics"] == 1


def test_one_prompt_says_nothing_of_chance(ctx):
    state = StageState()
    watch_statistics(ctx(), state, step({"brightness": 0.5 + 0.1 * DRAWS}, prompts=1))
    assert (
        watch_statistics(ctx(), state, step({"brightness": 0.9 + 0.1 * DRAWS}, prompts=1))[
            "alarm/statistics"
        ]
        == 0
    )


def test_a_step_is_compared_with_the_first_of_its_size(ctx):
    state = StageState()
    large = {"brightness": 0.9 + 0.1 * DRAWS}
    watch_statistics(ctx(), state, step({"brightness": 0.5 + 0.1 * DRAWS}, size=(32, 64)))
    assert (
        watch_statistics(ctx(), state, step(large, size=(64, 32)))["statistic_shift/brightness"]
        == 0
    )
    with pytest.warns(UserWarning, match=r"brightness of the images went from 0\.5 to 0\.9"):
        watch_statistics(ctx(), state, step(large, size=(32, 64)))


def test_a_stage_logs_the_statistics_of_its_rollouts(ctx, base_folder, make_prompts, model, scorer):
    context = ctx()
    recorder = MetricsRecorder()
    policy = Policy(model, context.recipe.policy, 0)
    run_online_stage(
        context,
        open_local_workers(context, PolicyUpdater(policy, context.online_config), scorer),
        make_prompts(6),
        recorder,
    )
    for row in recorder.metrics_rows:
        assert {f"statistic/{name}" for name in STATISTICS} <= row.keys()
        assert row["statistic/brightness"] == pytest.approx(1 - row["score/darkness"], abs=0.01)
    assert recorder.metrics_rows[0]["statistic_shift/brightness"] == 0
