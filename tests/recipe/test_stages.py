"""The choices of a stage: each has its own key, the algorithm sets what is left open, and what
cannot be is explained.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage_cases import BYPASS, GUIDED, keys_of, offline, online, problem, resolved

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
from ebbflow.recipe.optimizer_config import OptimizerConfig
from ebbflow.recipe.registry import ALGORITHMS
from ebbflow.recipe.stages import OfflineStageConfig, OnlineStageConfig

CONFIGS = ALGORITHMS
TRAJECTORY = [name for name, config in CONFIGS.items() if config.kind == "trajectory"]
FORWARD = [name for name, config in CONFIGS.items() if config.kind == "forward"]
GRADIENT = [
    name
    for name, config in CONFIGS.items()
    if config.kind in ("gradient", "reward_gradient", "direct_align")
]
STOCHASTIC = ["flow_sde", "dance_sde", "cps"]


NOT_REUSED = [
    ({"mode": "one_step_off"}, "mode is one_step_off", "set mode: sync"),
    ({"mode": "async"}, "mode is async", "set mode: sync"),
    ({"placement": "ray"}, "placement is ray", "set placement: in_process"),
    ({"engine": "vllm_omni"}, "engine is vllm_omni", "set engine: diffusers"),
    ({"updates_per_step": 2}, "updates_per_step is 2", "set updates_per_step: 1"),
    ({"name": "branch_grpo"}, "tree is given", "an algorithm without one"),
    ({"guidance_in_loss": False}, "guidance_in_loss is False", "leave guidance_in_loss out"),
    (
        {"rollout_precision": "bfloat16"},
        "rollout_precision is bfloat16",
        "leave rollout_precision out",
    ),
    ({"correction": {}}, "correction is given", "leave 'correction' out"),
]
"""(keys of a stage, what the error says of them, the fix)."""
REFUSED = [
    (
        online("mix_grpo", placement="ray", resources={"training": {"count": 2, "gpus": 0.5}}),
        "resources.training.gpus = 0.5 with count = 2",
        "NCCL needs a GPU of its own for each rank",
        "set gpus to 1, to 0 to train on CPUs, or count to 1",
    ),
    (
        online("mix_grpo", reference={"weight": 1, "guidance": 2}),
        "reference.guidance = 2",
        "policy and base",
        "leave it out",
    ),
    *(
        (
            online(name, sampler={"name": s}),
            name,
            f"'{s}' has none",
            "flow_sde, dance_sde or cps",
            "diffusion_nft",
        )
        for name in TRAJECTORY
        for s in ("ode", "dpm_solver")
    ),
    *(
        (
            online(name, window={"kind": "all"}),
            name,
            "final latents alone",
            "leave 'window' out",
            "mix_grpo",
        )
        for name in FORWARD
    ),
    *(
        (offline(name, correction={}), name, "no log-probs", "leave 'correction' out", "mix_grpo")
        for name in FORWARD
    ),
    *(
        (
            online(name, reference={"penalty": p}),
            name,
            f"'{p}' compares the steps of a trajectory",
            "take velocity",
        )
        for name in FORWARD
        for p in ("kl", "kl_without_dt")
    ),
    *(
        (
            online(name, advantages={"clip": None}),
            name,
            "advantages.clip = null is for algorithms on trajectories",
            "such as 5",
        )
        for name in FORWARD
    ),
    *(
        (offline(name), name, "needs fresh trajectories", "online stage", "diffusion_nft")
        for name in TRAJECTORY + GRADIENT
    ),
    *(
        (
            online(name, sampler={"name": s}),
            f"{name} takes the gradient",
            f"sampler.name = '{s}'",
            "leave sampler.name out",
        )
        for name in GRADIENT
        for s in ("flow_sde", "dpm_solver")
    ),
    *(
        (
            online(name, window={"kind": "all"}),
            f"{name} chooses its steps itself",
            "leave 'window' out",
        )
        for name in GRADIENT
    ),
    *(
        (
            online(name, correction={}),
            f"{name} trains on samples of the policy as it is",
            "leave it out",
        )
        for name in GRADIENT
    ),
    *(
        (
            online(name, guidance_in_loss=False),
            f"gradient of {name} goes through guided",
            "leave 'guid",
        )
        for name in GRADIENT
    ),
    *(
        (
            online(name, reference=r),
            f"the reference of {name} is its velocity",
            "reference.guidance = 1, or leave them out",
        )
        for name in GRADIENT
        for r in ({"penalty": "kl"}, {"weight": 1, "guidance": 2})
    ),
    (
        online("draft", algorithm={"name": "draft", "last_steps": 7}, sampler={"steps": 6}),
        "draft takes 7 steps with gradient",
        "sampler.steps = 6",
    ),
    *(
        (online(name, window=None), name, "trains on a window", "leave 'window' out")
        for name in TRAJECTORY
    ),
    (
        online("grpo_guard", sampler={"name": "cps"}),
        "grpo_guard needs log-probs that are densities",
        "1 / (2 b^2)",
        "flow_sde or dance_sde",
        "mix_grpo",
    ),
    (
        online(sampler={"name": "cps"}, correction={}),
        "correction.weights = 'truncated'",
        "log-probs of cps are none",
        "to none",
    ),
    *(
        (
            online(sampler={"name": "cps"}, correction={"weights": "none", "reject": r}),
            f"correction.reject = '{r}'",
            "are none",
            "correction.reject to none",
        )
        for r in ("k1", "k2", "k3")
    ),
    *(
        (
            online(correction={"mode": "bypass", "weights": w}),
            "bypass",
            "corrects nothing",
            f"weights = '{w}'",
            "weights: none, or mode: decoupled",
        )
        for w in ("truncated", "masked")
    ),
    (
        offline(advantages={"running": True}),
        "advantages.running",
        "an offline stage generates once",
        "leave it out",
    ),
    *(
        (
            online(window={"kind": kind, "tail": 0.4}),
            f"kind '{kind}' does not use tail = 0.4",
            "for fixed, random, progressive,",
            "leave it out",
        )
        for kind in ("all", "share")
    ),
    (
        online("flow_grpo", window={"size": 2}),
        "kind 'all' does not use size = 2 (for fixed, random, progressive, decaying)",
    ),
    (online(window={"decay": 0.3}), "kind 'progressive' does not use decay = 0.3 (for decaying)"),
    (
        online(window={"kind": "random", "roll_over": False, "share": 0.3}),
        "roll_over = False (for progressive, decaying)",
        "share = 0.3 (for share)",
    ),
    *(
        (
            online(
                sampler={"steps": 6}, window={"kind": kind, "size": 1, "start": 3, "limit": 0.5}
            ),
            f"a {kind} window would never move",
            "start = 3 must be below",
            "limit * sampler.steps = 3;",
            "raise limit, or take kind fixed",
        )
        for kind in ("random", "progressive")
    ),
    (
        online(
            sampler={"steps": 6}, window={"kind": "decaying", "size": 1, "start": 2, "limit": 0.3}
        ),
        "would never move",
        "limit * sampler.steps = 1.8",
    ),
    *(
        (
            online(guidance_in_loss=False, correction=c),
            "guidance_in_loss: false",
            "leave 'correction'",
        )
        for c in ({}, BYPASS)
    ),
    *(
        (
            online(name, guidance_in_loss=False),
            name,
            "without guidance always",
            "leave 'guidance_in_loss'",
        )
        for name in FORWARD
    ),
    *(
        (
            online("diffusion_nft", shared_initial_noise=True, sampler={"name": s}),
            "shared_initial_noise",
            "one and the same",
            s,
        )
        for s in ("ode", "dpm_solver")
    ),
    *(
        (
            online("diffusion_nft", sampler={"name": s, "eta": 0.5}),
            s,
            "deterministic and has no eta",
            "cps, dance_sde, flow_sde",
        )
        for s in ("ode", "dpm_solver")
    ),
    (
        online("diffusion_nft", tree={"splits": [0]}),
        "diffusion_nft trains on none",
        "set algorithm.name to branch_grpo",
    ),
    (
        online("distillation", tree={"splits": [0]}),
        "distillation learns from no reward",
        "leave 'tree' out",
    ),
    (
        online("gardo", tree={"splits": [0]}),
        "gardo reshapes those of whole samples",
        "set algorithm.name to branch_grpo",
    ),
    (
        {"kind": "offline", "reference": {"reset_every": 2}},
        "reference.reset_every and reference.reset_above renew the reference",
        "leave them out",
    ),
    (
        online("branch_grpo", tree={"splits": [0, 19]}),
        "tree.splits has 19",
        "sampler.steps = 20",
        "split at 18",
    ),
    (
        online("branch_grpo", group_size=24),
        "group_size = 24",
        "16 leaves",
        "tree.branches = 2 to the power of 4 splits",
    ),
    (online("branch_grpo", tree={"splits": [3, 0]}), "splits = [3, 0]", "ascending order"),
    (
        online("branch_grpo", advantages={"running": True}),
        "advantages.running",
        "leave one of them out",
    ),
    *(
        (
            online(name, reuse_rollout_forward=True),
            "reuse_rollout_forward is for algorithms on trajectories",
            name,
            "leave it out",
        )
        for name in FORWARD + GRADIENT
    ),
    *(
        (
            online(**{"updates_per_step": 1, **keys}, reuse_rollout_forward=True),
            f"reuse_rollout_forward: {said}",
            fix,
            "or leave reuse_rollout_forward out",
        )
        for keys, said, fix in NOT_REUSED
    ),
    (online(sampler={"name": "cps", "eta": 1.5}), "eta = 1.5", "cps", "1 or less"),
    (online(advantages={"running": True, "trim": 0.1}), "trim", "running", "take one of them"),
    (
        online("distillation", algorithm={"name": "distillation"}),
        "algorithm.distillation: it has no teacher",
        "or teachers one",
    ),
    (
        online(
            "distillation",
            algorithm={"name": "distillation", "teacher": "a", "teachers": {"x": "b"}},
        ),
        "leave one of them out",
    ),
    (
        online("distillation", algorithm={"name": "distillation", "teachers": {"x": "a?"}}),
        "distillation.teachers.x = 'a?'",
    ),
    (
        online(sampler={"steps": 4}),
        "start + size = 4",
        "sampler.steps = 4",
        "smaller window or more steps",
    ),
    (
        online(optimizer={"schedule": {"final": 0.1}}),
        "updates and final are for kind linear or cosine",
        "leave them out",
    ),
    (
        online(optimizer={"schedule": {"kind": "linear", "updates": 5, "warmup": 5}}),
        "updates = 5 must be above warmup = 5",
    ),
    (
        online(steps=3, updates_per_step=2, optimizer={"schedule": {"warmup": 6}}),
        "warmup = 6 takes the whole stage",
        "= 6 ",
    ),
    (
        {"kind": "custom", "path": "a:b", "optimizer": {"schedule": {"kind": "cosine"}}},
        "nobody knows how",
        "schedule.updates",
    ),
]


@pytest.mark.parametrize(("stage", "parts"), [(stage, parts) for stage, *parts in REFUSED])
def test_what_cannot_be_says_why_and_what_can(stage, parts):
    text = problem(stage)
    assert text.startswith("this recipe cannot be run:\nstages.0.")
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    "stage",
    [
        online(sampler={"name": "cps", "eta": 1.0}),
        online(sampler={"name": "cps"}, correction={"weights": "none"}),
        online(sampler={"name": "cps"}, correction={"mode": "bypass"}),
        online(sampler={"name": "cps"}, correction=BYPASS),
        online(correction=BYPASS),
        online(window={"kind": "fixed", "tail": 0.2}),
        online(window={"kind": "fixed", "size": 1, "start": 3}),
        online(window={"size": 1, "start": 2}),
        online(window={"size": 1, "start": 3, "limit": 0.6}),
        online(window={"kind": "decaying", "size": 1, "start": 4}),
        online("flow_grpo", window={"kind": "all", "size": 3, "limit": 0.5}),
        online(advantages={"running": True, "std": "group"}),
        online(advantages={"trim": 0.1, "keep_extremes": 2}),
        online("diffusion_nft", sampler={"name": "flow_sde", "eta": 0.5}),
        online("diffusion_nft", sampler={"name": "dpm_solver"}),
        online("diffusion_nft", window=None, correction=None),
        online("flow_grpo", reference={"penalty": "velocity"}),
        offline("awm", advantages={"trim": 0.1}),
        *(
            online(name, sampler={"name": s})
            for name in TRAJECTORY
            for s in STOCHASTIC
            if (name, s) != ("grpo_guard", "cps")
        ),
    ],
)
def test_what_can_be_is_resolved(stage):
    resolved(stage)


@pytest.mark.parametrize(
    ("family", "guidance", "works"), [("sd3", 4.5, True), ("sd3", 1.0, False), ("flux", 3.5, False)]
)
def test_guidance_can_be_left_out_of_the_loss_where_there_is_some(family, guidance, works):
    recipe = {
        "model": {"family": family, "path": "models/it", "guidance": guidance},
        "prompts": {"source": "prompts.txt"},
        "stages": [online(guidance_in_loss=False)],
    }
    if works:
        assert not Recipe.model_validate(recipe).stages[0].guidance_in_loss
        return
    with pytest.raises(
        RecipeError,
        match=(
            f"stages.0.guidance_in_loss = False.*{family}.*{guidance:g}.*leave guidance_in_loss out"
        ),
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


# Defaults follow the algorithm.


def test_the_default_of_an_online_stage_is_mix_grpo():
    stage = resolved({"kind": "online"})
    assert stage == resolved(online("mix_grpo"))
    assert (stage.algorithm.name, stage.sampler.name, stage.window.kind) == (
        "mix_grpo",
        "flow_sde",
        "progressive",
    )
    assert resolved({"kind": "offline"}) == resolved(offline("diffusion_nft"))


@pytest.mark.parametrize("name", CONFIGS)
def test_an_algorithm_sets_what_the_recipe_leaves_open(name):
    """Down to single keys, and nothing beyond what it declares."""
    stage = resolved(online(name))
    declared = CONFIGS[name].stage_defaults
    trajectory = name in TRAJECTORY
    assert stage.sampler == SamplerConfig(**declared.get("sampler", {}))
    assert stage.window == (WindowConfig(**declared["window"]) if trajectory else None)
    assert stage.advantages == AdvantagesConfig(**declared.get("advantages", {}))
    assert stage.reference == ReferenceConfig(
        **{"penalty": "kl" if trajectory else "velocity", **declared.get("reference", {})}
    )
    assert stage.correction is None
    assert stage.optimizer == OptimizerConfig(**declared.get("optimizer", {}))
    assert stage.updates_per_step == declared.get("updates_per_step", 2)


@pytest.mark.parametrize(
    ("name", "sampler", "window", "std", "weight", "penalty"),
    [
        ("flow_grpo", "flow_sde", "all", "global", 0.04, "kl_without_dt"),
        ("flow_grpo_fast", "flow_sde", "random", "global", 0, "kl"),
        ("mix_grpo", "flow_sde", "progressive", "group", 0, "kl"),
        ("dance_grpo", "dance_sde", "share", "group", 0, "kl"),
        ("branch_grpo", "dance_sde", "all", "group", 0, "kl"),
        ("grpo_guard", "flow_sde", "all", "global", 0, "kl"),
        ("flow_dppo", "flow_sde", "random", "global", 0, "kl"),
        ("diffusion_nft", "dpm_solver", None, "global", 1e-4, "velocity"),
        ("awm", "dpm_solver", None, "global", 1e-3, "velocity"),
        ("crd", "ode", None, "global", 0.1, "velocity"),
        ("diffusion_dpo", "flow_sde", None, "global", 0, "velocity"),
        ("dgpo", "dpm_solver", None, "group", 0.02, "velocity"),
        ("sft", "flow_sde", None, "global", 0, "velocity"),
    ],
)
def test_algorithm_has_its_published_defaults(name, sampler, window, std, weight, penalty):
    stage = resolved(online(name))
    assert stage.sampler.name == sampler
    assert (stage.window.kind if stage.window else None) == window
    assert stage.advantages.std == std
    assert (stage.reference.weight, stage.reference.penalty) == (weight, penalty)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (
            online("dance_grpo", sampler={"steps": 9}),
            {"sampler": SamplerConfig(name="dance_sde", steps=9)},
        ),
        (
            online("dance_grpo", window={"share": 0.2}),
            {"window": WindowConfig(kind="share", share=0.2)},
        ),
        (
            online("dance_grpo", window={"kind": "share"}),
            {"window": WindowConfig(kind="share", share=0.6)},
        ),
        (
            online("dance_grpo", sampler={"name": "dance_sde", "eta": 1}),
            {"sampler": SamplerConfig(name="dance_sde", steps=16, eta=1)},
        ),
        (
            online("dance_grpo", sampler={"name": "flow_sde"}),
            {"sampler": SamplerConfig(name="flow_sde", steps=16)},
        ),
        (
            online("dance_grpo", optimizer={"weight_decay": 0}),
            {"optimizer": OptimizerConfig(lr=1e-5, weight_decay=0)},
        ),
        (
            online("dance_grpo", advantages={"clip": 2}),
            {"advantages": AdvantagesConfig(std="group", clip=2)},
        ),
        (
            online("dance_grpo", advantages={"std": "none"}),
            {"advantages": AdvantagesConfig(std="none")},
        ),
        (
            online("flow_grpo_fast", window={"start": 1}),
            {"window": WindowConfig(kind="random", size=2, start=1, limit=0.4)},
        ),
        (
            online("flow_grpo", reference={"penalty": "velocity"}),
            {"reference": ReferenceConfig(weight=0.04, penalty="velocity")},
        ),
        (
            online("flow_grpo", reference={"weight": 0}),
            {"reference": ReferenceConfig(weight=0, penalty="kl_without_dt")},
        ),
        (
            online("crd", reference={"weight": 0.5}),
            {"reference": ReferenceConfig(weight=0.5, guidance=4.5, adaptive=True)},
        ),
        (
            online("mix_grpo", window={"tail": 0.4}),
            {
                "window": WindowConfig(
                    kind="progressive", size=4, limit=1, steps_per_window=25, tail=0.4
                )
            },
        ),
        (
            offline("awm", sampler={"steps": 9}),
            {"sampler": SamplerConfig(name="dpm_solver", steps=9)},
        ),
        (offline("awm", sampler={"name": "ode"}), {"sampler": SamplerConfig(name="ode", steps=14)}),
    ],
)
def test_a_single_given_key_keeps_the_rest_of_the_defaults(stage, expected):
    found = resolved(stage)
    assert {key: getattr(found, key) for key in expected} == expected


@pytest.mark.parametrize("kind", WINDOW_KEYS)
@pytest.mark.parametrize("name", TRAJECTORY)
def test_another_kind_of_window_has_its_own_defaults(name, kind):
    declared = CONFIGS[name].stage_defaults["window"]
    own = declared if declared["kind"] == kind else {"kind": kind}
    stage = resolved(online(name, window={"kind": kind}))
    assert stage.window == WindowConfig(**own)
    assert resolved(stage.model_dump(mode="json")) == stage
    assert OnlineStageConfig(
        algorithm=keys_of(name), window=WindowConfig(kind=kind)
    ).window == WindowConfig(**own)


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
