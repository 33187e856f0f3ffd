"""The alarms on a stage's first update: a ratio that is off 1, and terms that the clip leaves
without a gradient.
"""

from __future__ import annotations

import math
import warnings

import pytest

from ebbflow.models import load_model
from ebbflow.online.first_update_alarm import MAX_DEAD_SHARE, find_first_update_alarms
from ebbflow.online.loop import run_online_stage
from ebbflow.online.workers import open_local_workers
from ebbflow.recipe.registry import ALGORITHMS
from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater

DIMS = 512
ROUGH = {"rollout_precision": "bfloat16", "steps": 1, "updates_per_step": 1}
CLIPPED = [("flow_grpo", 1e-3), ("flow_grpo", 1e-4), ("flow_grpo_fast", 1e-5), ("grpo_guard", 2e-6)]


def stage_of(algorithm, **stage):
    return OnlineStageConfig.model_validate({"algorithm": algorithm, **stage})


def said(stage, corrected=True, **metrics):
    """The alarms of a stage whose first update has these metrics, unless ``corrected``, without the
    one of the correction.

    Each is a warning, too.
    """
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        alarms = find_first_update_alarms(stage, "float32", metrics, DIMS)
    assert len(warned) == len(alarms)
    return [alarm for alarm in alarms if not (corrected and "nothing corrects" in alarm)]


@pytest.mark.parametrize(("name", "clip"), CLIPPED)
def test_the_tolerance_of_the_first_ratio_is_a_tenth_of_the_clip_range(name, clip):
    """1e-5 for all of them would let 21 % of the terms at a clip of 1e-5, and 44 % at 2e-6, go
    without a gradient.
    """
    stage = stage_of({"name": name, "clip_range": clip})
    assert said(stage, **{"ratio/first_deviation": 0.09 * clip}) == []
    (alarm,) = said(stage, **{"ratio/first_deviation": 0.11 * clip})
    assert f"the first ratio is off 1 by {0.11 * clip:.2g}" in alarm
    assert "micro_batch" in alarm


def test_without_a_clip_range_the_tolerance_is_that_of_rounding():
    stage = stage_of({"name": "distillation", "teacher": "elsewhere"})
    assert said(stage, **{"ratio/first_deviation": 0.9e-5}) == []
    assert len(said(stage, **{"ratio/first_deviation": 1.1e-5})) == 1


def test_the_range_of_a_divergence_limit_is_the_log_prob_change_that_reaches_it():
    """KL = kappa / (2 D) for kappa = |mu - mu_old|^2 / b^2, and the log-prob moves by sqrt(kappa) /
    D.
    """
    limit = 1e-5
    kappa = 2 * DIMS * limit
    hyper = ALGORITHMS["flow_dppo"](divergence_limit=limit)
    assert hyper.ratio_range(DIMS) == pytest.approx(math.sqrt(kappa) / DIMS)


@pytest.mark.parametrize(
    "known",
    [
        {"correction": {"mode": "decoupled"}},
        {"rollout_precision": "bfloat16"},
        {"engine": "vllm_omni"},
    ],
)
def test_a_deviation_that_has_a_known_cause_is_no_alarm(known):
    assert said(stage_of({"name": "mix_grpo"}, **known), **{"ratio/first_deviation": 0.1}) == []


@pytest.mark.parametrize("stage", [{}, {"rollout_precision": "bfloat16"}, {"engine": "vllm_omni"}])
def test_dead_terms_are_an_alarm_whatever_their_cause(stage):
    stage = stage_of({"name": "flow_grpo_fast", "clip_range": 1e-5}, **stage)
    assert said(stage, **{"ratio/first_dead_share": MAX_DEAD_SHARE}) == []
    (alarm,) = said(stage, **{"ratio/first_dead_share": 0.21})
    assert "21.0 % of the terms of the first update have no gradient" in alarm
    assert "clip_range" in alarm


@pytest.mark.parametrize("stage", [{"mode": "async"}, {"rollout_precision": "bfloat16"}])
def test_another_engine_is_corrected_by_default(stage):
    stage = stage_of({"name": "mix_grpo"}, engine="vllm_omni", **stage)
    assert said(stage, corrected=False) == []


APART = [
    {"mode": "one_step_off"},
    {"mode": "async"},
    {"rollout_precision": "bfloat16"},
]


@pytest.mark.parametrize("stage", APART)
def test_rollouts_of_another_policy_are_corrected_or_an_alarm(stage):
    """Until somebody says that they are to be trained on as they are."""
    stage = {"algorithm": {"name": "mix_grpo"}, **stage}
    (alarm,) = said(OnlineStageConfig.model_validate(stage), corrected=False)
    assert "nothing corrects" in alarm
    for correction in ({"mode": "bypass"}, {"mode": "decoupled", "level": "trajectory"}):
        assert str(correction).replace("'", "") in alarm, "it can be copied into a recipe"
        assert (
            said(
                OnlineStageConfig.model_validate({**stage, "correction": correction}),
                corrected=False,
            )
            == []
        )


@pytest.mark.parametrize("stage", [{}, {"rollout_precision": "float32"}, {"engine": "vllm_omni"}])
def test_rollouts_of_the_policy_itself_need_no_correction(stage):
    assert said(stage_of({"name": "mix_grpo"}, **stage), corrected=False) == []


@pytest.fixture
def run(make_recipe, make_prompts, base_folder, scorer):
    """Run an online stage; returns (the metrics of its first step, the alarms of its record)."""

    def stage(**online):
        recipe = make_recipe(online=online)
        ctx = StageContext(recipe, 0, 0)
        recorder = MetricsRecorder()
        updater = PolicyUpdater(
            Policy(load_model(base_folder), recipe.policy, 0), ctx.online_config
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            record = run_online_stage(
                ctx, open_local_workers(ctx, updater, scorer), make_prompts(6), recorder
            )
        return recorder.metrics_rows[0], [
            alarm for alarm in record.alarms if "gradient" in alarm or "ratio" in alarm
        ]

    return stage


@pytest.mark.parametrize(
    ("algorithm", "dead"),
    [
        ({"name": "mix_grpo", "clip_range": 1e-2}, False),
        ({"name": "mix_grpo", "clip_range": 1e-5}, True),
        ({"name": "grpo_guard", "clip_range": 2e-6}, True),
        ({"name": "flow_dppo", "divergence_limit": 1e-9}, True),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else None,
)
def test_rough_rollouts_ring_where_the_clip_range_is_too_narrow_for_them(run, algorithm, dead):
    metrics, alarms = run(algorithm=algorithm, correction={"mode": "bypass"}, **ROUGH)
    assert (metrics["ratio/first_dead_share"] > 0.1) == dead
    assert [alarm for alarm in alarms if "have no gradient" in alarm] == alarms
    assert len(alarms) == dead


def test_a_decoupled_correction_leaves_no_term_dead(run):
    metrics, alarms = run(
        algorithm={"name": "mix_grpo", "clip_range": 1e-5}, correction={}, **ROUGH
    )
    assert metrics["ratio/first_dead_share"] == 0
    assert alarms == []


def test_the_alarm_is_of_the_first_step_alone(run):
    online = ROUGH | {
        "steps": 2,
        "algorithm": {"name": "mix_grpo", "clip_range": 1e-5},
        "correction": {"mode": "bypass"},
    }
    assert len(run(**online)[1]) == 1
