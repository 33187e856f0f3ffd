"""The choices of a stage: each has its own key, the algorithm sets what is left open, and what
cannot be is explained.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage_cases import (
    CONFIGS,
    FORWARD,
    GRADIENT,
    GUIDED,
    STOCHASTIC,
    TRAJECTORY,
    keys_of,
    offline,
    online,
    problem,
    resolved,
)

from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.algorithms import EmaScheduleConfig
from ebbflow.recipe.choices import (
    WINDOW_KEYS,
    AdvantagesConfig,
    CorrectionConfig,
    ReferenceConfig,
    SamplerConfig,
    WindowConfig,
)
from ebbflow.recipe.digest import select_set_keys
from ebbflow.recipe.stages import OfflineStageConfig, OnlineStageConfig


@pytest.mark.parametrize("key", ["guidance_in_loss", "negative_gradient"])
@pytest.mark.parametrize(
    ("family", "guidance", "works"), [("sd3", 4.5, True), ("sd3", 1.0, False), ("flux", 3.5, False)]
)
def test_guidance_can_be_left_out_of_the_loss_where_there_is_some(family, guidance, works, key):
    recipe = {
        "model": {"family": family, "path": "models/it", "guidance": guidance},
        "prompts": {"source": "prompts.txt"},
        "stages": [online(**{key: False})],
    }
    if works:
        assert not getattr(Recipe.model_validate(recipe).stages[0], key)
        return
    with pytest.raises(
        RecipeError, match=f"stages.0.{key} = False.*{family}.*{guidance:g}.*leave {key} out"
    ):
        Recipe.model_validate(recipe)


def test_weights_that_are_offloaded_do_not_wait_for_an_update():
    recipe = {
        "model": {**GUIDED, "cpu_offload": True},
        "stages": [online(updates_per_step=1, reuse_rollout_forward=True)],
    }
    with pytest.raises(
        RecipeError,
        match=r"stages\.0\.reuse_rollout_forward .* model\.cpu_offload .* leave one of them out",
    ):
        Recipe.model_validate(recipe)


def test_the_digest_of_a_recipe_knows_reused_passes_only_where_there_are_some():
    plain, reused = (
        resolved(online(updates_per_step=1, reuse_rollout_forward=reuse)) for reuse in (False, True)
    )
    assert "reuse_rollout_forward" not in select_set_keys(plain)
    assert select_set_keys(reused)["reuse_rollout_forward"] is True


OTHER_VALUES = {
    "size": 2,
    "start": 1,
    "limit": 0.75,
    "stride": 2,
    "steps_per_window": 3,
    "decay": 0.5,
    "decay_after": 1,
    "roll_over": False,
    "share": 0.3,
    "tail": 0.5,
}


@pytest.mark.parametrize("key", OTHER_VALUES)
@pytest.mark.parametrize("kind", WINDOW_KEYS)
def test_a_kind_of_window_takes_the_keys_that_it_uses_and_no_others(kind, key):
    assert OTHER_VALUES.keys() == WindowConfig.model_fields.keys() - {"kind"}
    stage = online(window={"kind": kind, key: OTHER_VALUES[key]})
    if key in WINDOW_KEYS[kind]:
        assert getattr(resolved(stage).window, key) == OTHER_VALUES[key]
    else:
        assert f"a window of kind {kind!r} does not use {key} = {OTHER_VALUES[key]!r}" in problem(
            stage
        )


def test_parts_of_a_stage_may_be_given_as_objects():
    given_as_objects = OnlineStageConfig(
        algorithm=CONFIGS["dance_grpo"](clip_range=0.01),
        sampler=SamplerConfig(steps=9),
        advantages=AdvantagesConfig(clip=2),
    )
    as_keys = online(
        "dance_grpo",
        algorithm={"name": "dance_grpo", "clip_range": 0.01},
        sampler={"steps": 9},
        advantages={"clip": 2},
    )
    assert given_as_objects == resolved(as_keys)
    assert OfflineStageConfig(algorithm=CONFIGS["crd"]()) == resolved(offline("crd"))


@pytest.mark.parametrize("kind", ["online", "offline"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_resolved_recipe_reloads_to_itself(name, kind):
    if kind not in CONFIGS[name].stages:
        assert name in problem({"kind": kind, "algorithm": keys_of(name)})
        return
    recipe = Recipe.model_validate(
        {"model": GUIDED, "stages": [{"kind": kind, "algorithm": keys_of(name)}]}
    )
    again = Recipe.model_validate_json(recipe.model_dump_json())
    assert again == recipe == Recipe.model_validate(recipe.model_dump())
    assert again.digest == recipe.digest
    assert type(again.stages[0].hyper_parameters) is CONFIGS[name]


stages = st.fixed_dictionaries(
    {"name": st.sampled_from(sorted(CONFIGS)), "kind": st.sampled_from(["online", "offline"])},
    optional={
        "sampler": st.fixed_dictionaries(
            {},
            optional={
                "name": st.sampled_from(["ode", "dpm_solver", *STOCHASTIC]),
                "steps": st.integers(2, 12),
                "eta": st.floats(0.1, 2),
            },
        ),
        "window": st.none()
        | st.fixed_dictionaries(
            {},
            optional={
                "kind": st.sampled_from(
                    ["all", "fixed", "random", "progressive", "decaying", "share"]
                ),
                "size": st.integers(1, 4),
                "tail": st.floats(0.1, 0.9),
            },
        ),
        "reference": st.fixed_dictionaries(
            {},
            optional={
                "weight": st.floats(0, 1),
                "penalty": st.sampled_from(["kl", "kl_without_dt", "velocity"]),
            },
        ),
        "correction": st.none()
        | st.fixed_dictionaries(
            {},
            optional={
                "mode": st.sampled_from(["bypass", "decoupled"]),
                "unit": st.sampled_from(["mean", "sum"]),
                "weights": st.sampled_from(["none", "truncated", "masked"]),
                "reject": st.sampled_from(["none", "k1", "k2", "k3"]),
            },
        ),
        "advantages": st.fixed_dictionaries(
            {}, optional={"running": st.booleans(), "trim": st.sampled_from([0.0, 0.2])}
        ),
    },
)


@given(stages)
def test_every_choice_is_a_stage_that_reloads_to_itself_or_explained(choice):
    """And a stage that is taken keeps every key that was given."""
    data = {
        **{key: value for key, value in choice.items() if key != "name"},
        "algorithm": keys_of(choice["name"]),
    }
    try:
        stage = resolved(data)
    except RecipeError:
        assert problem(data).startswith("this recipe cannot be run:\nstages.0.")
        return
    assert resolved(stage.model_dump()) == resolved(stage.model_dump(mode="json")) == stage
    assert (stage.window is not None) == (choice["name"] in TRAJECTORY)
    without_noise = [*FORWARD, *GRADIENT, "tdm", "tdm_r1"]
    assert choice["name"] in without_noise or stage.sampler.name in STOCHASTIC
    for part in ("sampler", "window", "reference", "correction", "advantages"):
        for key, value in (choice.get(part) or {}).items():
            assert getattr(getattr(stage, part), key) == value


# The defaults of a correction.


@pytest.mark.parametrize(("mode", "weights"), [("bypass", "none"), ("decoupled", "truncated")])
def test_weights_follow_the_mode_unless_given(mode, weights):
    correction = resolved(online(correction={"mode": mode})).correction
    assert (correction.mode, correction.weights) == (mode, weights)
    assert resolved(online(correction=correction.model_dump())).correction == correction
    assert (
        resolved(online(correction={"mode": mode, "weights": "none"})).correction.weights == "none"
    )


@pytest.mark.parametrize(
    ("given_keys", "low", "high", "reject_above"),
    [
        ({}, 0.8, 1.25, 0.25),
        ({"unit": "sum", "reject": "k1"}, 0.8, 1.25, 0.25),
        ({"reject": "k2"}, 0.8, 1.25, 0.03),
        ({"reject": "k3"}, 0.8, 1.25, 0.03),
        ({"unit": "mean"}, 0.9995, 1.0005, 5e-4),
        ({"unit": "mean", "reject": "k1"}, 0.9995, 1.0005, 5e-4),
        ({"unit": "mean", "reject": "k2"}, 0.9995, 1.0005, 1.25e-7),
        ({"unit": "mean", "reject": "k3"}, 0.9995, 1.0005, 1.25e-7),
        ({"unit": "mean", "high": 1.5}, 0.9995, 1.5, 5e-4),
        ({"unit": "mean", "reject": "k3", "reject_above": 1e-3}, 0.9995, 1.0005, 1e-3),
    ],
)
def test_thresholds_follow_the_unit_unless_given(given_keys, low, high, reject_above):
    correction = CorrectionConfig(**given_keys)
    assert (correction.low, correction.high, correction.reject_above) == (low, high, reject_above)
    assert resolved(online(correction=given_keys)).correction == correction
    assert CorrectionConfig.model_validate(correction.model_dump()) == correction


@pytest.mark.parametrize("unit", ["mean", "sum"])
@pytest.mark.parametrize("squared", ["k2", "k3"])
def test_the_default_thresholds_agree_with_each_other(unit, squared):
    """k2 and k3 of a difference are about its square over 2."""
    plain, square = (
        CorrectionConfig(unit=unit, reject=reject).reject_above for reject in ("k1", squared)
    )
    assert square == pytest.approx(plain**2 / 2, rel=0.05)


# Copies that follow.


@given(
    st.integers(0, 10),
    st.floats(0, 1),
    st.lists(st.floats(0, 0.99), min_size=2, max_size=2),
    st.integers(1, 40),
)
def test_a_following_copy_lags_ever_more_up_to_a_limit(flat, slope, limits, step):
    least, most = sorted(limits)
    following = EmaScheduleConfig(warmup=flat, min_decay=least, slope=slope, max_decay=most)
    assert least <= following.decay_after_step(step) <= following.decay_after_step(step + 1) <= most
    if step <= flat:
        assert following.decay_after_step(step) == least


def test_a_reference_is_guided_only_where_the_family_has_guidance():
    says = (
        r"stages.0.reference.guidance = 4.5 .* model.family = 'glyph' has not; set"
        r" reference.guidance to 1"
    )
    with pytest.raises(RecipeError, match=says):
        Recipe.model_validate({"stages": [online("crd")]})
    for reference in ({"guidance": 1}, {"weight": 0}):
        assert (
            not Recipe.model_validate({"stages": [online("crd", reference=reference)]})
            .stages[0]
            .reference.needs_guidance
        )
    assert resolved(online("crd")).reference == ReferenceConfig(
        weight=0.1, guidance=4.5, adaptive=True
    )


def test_a_decay_that_begins_above_its_limit_is_refused():
    stage = online("crd", algorithm={"name": "crd", "old": {"min_decay": 0.9, "max_decay": 0.5}})
    assert "min_decay = 0.9 is above max_decay = 0.5" in problem(stage)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"max_decay": 0}, {1: 0, 50: 0}),
        ({"slope": 0.001, "max_decay": 0.5}, {1: 0.001, 100: 0.1, 500: 0.5, 900: 0.5}),
        (
            {"warmup": 75, "slope": 0.0075, "max_decay": 0.999},
            {75: 0, 76: 0.0075, 175: 0.75, 300: 0.999},
        ),
        (
            {"min_decay": 0.25, "slope": 0.005, "max_decay": 0.999},
            {1: 0.255, 50: 0.5, 149: 0.995, 150: 0.999},
        ),
    ],
)
def test_ema_schedule_has_its_published_decay(keys, expected):
    assert {
        step: EmaScheduleConfig(**keys).decay_after_step(step) for step in expected
    } == pytest.approx(expected)


FROM_BASE = {"kind": "offline", "only_from_base": True}


@pytest.mark.parametrize("stages", [[FROM_BASE], [{"kind": "online"}, FROM_BASE]])
def test_a_stage_for_the_base_model_alone_needs_another_one_after_it(stages):
    with pytest.raises(RecipeError, match="would train nothing after it; add a stage"):
        Recipe.model_validate({"stages": stages})
    assert Recipe.model_validate({"stages": [FROM_BASE, {"kind": "online"}]})


def test_a_stage_of_a_branch_is_not_for_the_base_model_alone():
    merge = {"kind": "online", "algorithm": {"name": "distillation", "teacher": "branch:a"}}
    stages = [FROM_BASE | {"branch": "a"}, merge]
    with pytest.raises(RecipeError, match="the branch 'a', which needs all of its stages"):
        Recipe.model_validate({"branches": {"a": {}}, "stages": stages})
