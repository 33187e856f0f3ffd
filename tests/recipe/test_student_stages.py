"""Stages of few-step students: what they take, and whom they teach."""

from __future__ import annotations

import pytest
from stage_cases import BYPASS, GUIDED, offline, online, problem, resolved

from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.choices import SamplerConfig


def test_a_student_takes_its_own_steps_and_no_log_probs():
    assert resolved(online("dmd2")).sampler == SamplerConfig(name="cps", eta=1.0, steps=4)
    assert resolved(online("dmd2", sampler={"steps": 2})).sampler == SamplerConfig(
        name="cps", eta=1.0, steps=2
    )
    assert resolved(online("tdm")).sampler == SamplerConfig(name="ode", steps=4)
    assert resolved(online("tdm")).reference.penalty == "velocity"


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        (
            online("tdm", sampler={"name": "cps"}),
            "tdm matches the ends of deterministic steps, and sampler.name = 'cps'; take ode",
        ),
        (
            online("tdm", algorithm={"name": "tdm", "sigma": {"kind": "schedule"}}),
            (
                "algorithm.sigma.kind = 'schedule' has none but the ends of it, which say nothing;"
                " take uniform or logit_normal"
            ),
        ),
        (
            online("tdm_r1", algorithm={"name": "tdm_r1", "surrogate_sigma": {"kind": "schedule"}}),
            "or leave algorithm.surrogate_sigma out",
        ),
        (
            online("dmd2", sampler={"name": "unipc"}),
            "'unipc' needs the step before; set sampler.name to cps or ode",
        ),
        (
            online("dmd2", window={"kind": "all"}),
            "dmd2 takes the student's steps itself; leave 'window' and 'correction' out",
        ),
        (online("dmd2", correction=BYPASS), "leave 'window' and 'correction' out"),
        (online("dmd2", guidance_in_loss=False), "leave 'guidance_in_loss' out"),
        (
            online("dmd2", reference={"penalty": "kl"}),
            "reference.penalty = 'kl' compares the steps of a trajectory",
        ),
        (offline("dmd2"), "dmd2 needs fresh trajectories: use it in an online stage"),
    ],
)
def test_a_student_s_stage_that_cannot_be_is_explained(stage, says):
    assert says in problem(stage)


@pytest.mark.parametrize(
    ("rest", "stages", "says"),
    [
        (
            {"rounds": 2},
            [online("dmd2")],
            "stages.0.algorithm has no teacher.*a student of few steps in round 2; give teacher",
        ),
        (
            {},
            [online("dmd2"), online("tdm")],
            "stages.1.algorithm has no teacher.*since stages.0; give teacher a policy folder",
        ),
        (
            {"model": GUIDED | {"guidance": 4.0}},
            [online("dmd2")],
            "without guidance, and model.guidance = 4; set it to 1",
        ),
        (
            {},
            [online("dmd2", algorithm={"name": "dmd2", "guidance": 3})],
            "model.family = 'glyph' has not; leave it out",
        ),
        (
            {},
            [online("tdm_r1", algorithm={"name": "tdm_r1", "surrogate_guidance": 2})],
            "a guidance of 2 needs classifier-free guidance, which model.family = 'glyph' has not",
        ),
        (
            {"model": {"precision": "float16"}},
            [online("dmd2")],
            "the fake score of dmd2 has no float16; take bfloat16",
        ),
    ],
)
def test_a_student_that_cannot_be_trained_is_explained(rest, stages, says):
    with pytest.raises(RecipeError, match=says):
        Recipe.model_validate({"stages": stages, **rest})


BRANCHES = {"branches": {"letters": {}, "digits": {}}}
LETTERS = {"branch": "letters"}
DIGITS = {"branch": "digits"}
MERGE = online("distillation", algorithm={"name": "distillation", "teacher": "branch:letters"})
OTHER_MERGE = online("distillation", algorithm={"name": "distillation", "teacher": "branch:digits"})


def taught_by(branch):
    return online("tdm", algorithm={"name": "tdm", "teacher": f"branch:{branch}"})


@pytest.mark.parametrize(
    ("rest", "stages"),
    [
        ({}, [online("dmd2", **LETTERS), online("dmd2", **DIGITS), MERGE, OTHER_MERGE]),
        ({"rounds": 2}, [online("dmd2", **LETTERS), online("dmd2", **DIGITS), MERGE, OTHER_MERGE]),
        ({}, [online("dmd2", **LETTERS), online("mix_grpo", **DIGITS), MERGE, taught_by("digits")]),
        (
            {},
            [
                online("mix_grpo", **LETTERS),
                online("mix_grpo", **DIGITS),
                online("dmd2"),
                taught_by("letters"),
                OTHER_MERGE,
            ],
        ),
    ],
    ids=["branches", "rounds", "a branch of many steps", "branches before a student"],
)
def test_a_student_in_one_branch_leaves_the_others_as_they_are(rest, stages):
    recipe = Recipe.model_validate({"stages": stages, **BRANCHES, **rest})
    assert len(recipe.stages) == len(stages)


@pytest.mark.parametrize(
    ("rest", "stages", "says"),
    [
        (
            {},
            [
                online("dmd2", **LETTERS),
                online("mix_grpo", **DIGITS),
                OTHER_MERGE,
                taught_by("letters"),
            ],
            (
                "stages.3.algorithm.teacher = 'branch:letters' is a student of few steps since"
                " stages.0; give teacher a policy folder"
            ),
        ),
        (
            {},
            [
                online("dmd2", **LETTERS),
                online(**LETTERS),
                online("mix_grpo", **DIGITS),
                OTHER_MERGE,
                taught_by("letters"),
            ],
            (
                "stages.4.algorithm.teacher = 'branch:letters' is a student of few steps since"
                " stages.0"
            ),
        ),
        (
            {},
            [
                online("dmd2"),
                online("mix_grpo", **LETTERS),
                online("mix_grpo", **DIGITS),
                OTHER_MERGE,
                taught_by("letters"),
            ],
            (
                "stages.4.algorithm.teacher = 'branch:letters' is a student of few steps since"
                " stages.0"
            ),
        ),
        (
            {"rounds": 2},
            [
                online("mix_grpo", **LETTERS),
                online("mix_grpo", **DIGITS),
                OTHER_MERGE,
                taught_by("letters"),
            ],
            "stages.3.algorithm.teacher = 'branch:letters' is a student of few steps in round 2",
        ),
        (
            {},
            [
                online("dmd2", **LETTERS),
                online("tdm", **LETTERS),
                online("mix_grpo", **DIGITS),
                MERGE,
                OTHER_MERGE,
            ],
            "stages.1.algorithm has no teacher.*since stages.0",
        ),
        (
            {},
            [
                online("dmd2"),
                online("mix_grpo", **LETTERS),
                online("tdm", **DIGITS),
                MERGE,
                OTHER_MERGE,
            ],
            "stages.2.algorithm has no teacher.*since stages.0",
        ),
    ],
)
def test_a_student_of_few_steps_is_no_teacher_through_a_branch(rest, stages, says):
    with pytest.raises(RecipeError, match=says):
        Recipe.model_validate({"stages": stages, **BRANCHES, **rest})


def test_a_student_learns_with_guidance_from_a_named_teacher():
    stage = online("dmd2", algorithm={"name": "dmd2", "teacher": "elsewhere", "guidance": 4.5})
    recipe = Recipe.model_validate({"model": GUIDED, "rounds": 2, "stages": [stage]})
    assert recipe.stages[0].needs_guided_copy
    assert not resolved(online("dmd2")).needs_guided_copy
