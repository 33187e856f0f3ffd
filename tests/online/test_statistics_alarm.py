"""The alarm on image statistics: it rings once per statistic, beyond its limit and beyond chance."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from ebbflow.evaluation.image_statistics import STATISTICS, no_statistics
from ebbflow.online.local_workers import local_workers
from ebbflow.online.loop import run_online_stage
from ebbflow.online.statistics_alarm import watch_statistics
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training.policy import Policy
from ebbflow.training.stage_loop import StageState
from ebbflow.training.update import PolicyUpdater

DRAWS = np.random.default_rng(0).normal(size=200)
DRAWS = (DRAWS - DRAWS.mean()) / DRAWS.std()
CHANCE = 0.2
"""Two standard errors of the difference between two means of 200."""


@pytest.fixture
def ctx(make_recipe):
    def context(**online):
        return StageContext(make_recipe(online={"statistics_alarm": 1.0} | online), 0, 0)

    return context


@pytest.mark.filterwarnings("ignore:brightness of the images")
@pytest.mark.parametrize(("shift", "rings"), [(0.0, False), (1.1, False), (1.3, True), (-1.1, False), (-1.3, True)])
def test_it_rings_beyond_its_limit_and_chance_in_either_direction(ctx, shift, rings):
    state = StageState()
    first = watch_statistics(ctx(), state, {"brightness": 0.5 + 0.1 * DRAWS})
    assert first == {"statistic/brightness": pytest.approx(0.5), "statistic_shift/brightness": 0.0, "alarm/statistics": 0.0}
    metrics = watch_statistics(ctx(), state, {"brightness": 0.5 + 0.1 * (DRAWS + shift)})
    assert metrics["statistic_shift/brightness"] == pytest.approx(shift)
    assert metrics["alarm/statistics"] == rings
    assert len(state.alarms) == rings


def test_it_warns_once_of_each_statistic_and_names_numbers_and_the_key(ctx):
    state, start = StageState(), {"brightness": 0.5 + 0.1 * DRAWS, "entropy": 0.5 + 0.1 * DRAWS}
    watch_statistics(ctx(), state, start)
    state.step = 7
    with pytest.warns(
        UserWarning, match=r"brightness .* from 0.5 to 0.8, \+3 standard deviations.*statistics_alarm = 1, in step 7"
    ):
        watch_statistics(ctx(), state, start | {"brightness": 0.8 + 0.1 * DRAWS})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics = watch_statistics(ctx(), state, start | {"brightness": 0.8 + 0.1 * DRAWS})
    assert metrics["alarm/statistics"] == 1
    assert len(state.alarms) == 1
    with pytest.warns(UserWarning, match="entropy"):
        watch_statistics(ctx(), state, start | {"entropy": 0.2 + 0.1 * DRAWS})


def test_a_checkpoint_keeps_what_it_compares_with(ctx):
    state = StageState()
    watch_statistics(ctx(), state, {"brightness": 0.5 + 0.1 * DRAWS})
    resumed = StageState()
    resumed.load_state_dict(state.state_dict())
    with pytest.warns(UserWarning, match="brightness"):
        watch_statistics(ctx(), resumed, {"brightness": 0.9 + 0.1 * DRAWS})


def test_it_can_be_switched_off_and_images_that_nobody_saw_do_not_count(ctx):
    state = StageState()
    assert watch_statistics(ctx(), state, no_statistics(4)) == {"alarm/statistics": 0.0}
    watch_statistics(ctx(statistics_alarm=None), state, {"brightness": 0.5 + 0.1 * DRAWS})
    lost = np.where(np.arange(200) < 20, np.nan, 0.9 + 0.1 * DRAWS)
    metrics = watch_statistics(ctx(statistics_alarm=None), state, {"brightness": lost})
    assert metrics["statistic_shift/brightness"] == pytest.approx(4, abs=0.3)
    assert state.alarms == []


def test_a_stage_logs_the_statistics_of_its_rollouts(ctx, base_folder, make_prompts, model, scorer):
    context, recorder = ctx(), MetricsRecorder()
    policy = Policy(model, context.recipe.policy, 0)
    run_online_stage(context, local_workers(context, PolicyUpdater(policy, context.online), scorer), make_prompts(6), recorder)
    for row in recorder.metrics:
        assert {f"statistic/{name}" for name in STATISTICS} <= row.keys()
        assert row["statistic/brightness"] == pytest.approx(1 - row["score/darkness"], abs=0.01)
    assert recorder.metrics[0]["statistic_shift/brightness"] == 0
