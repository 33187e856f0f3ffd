"""An algorithm sets what the recipe of a stage leaves open, key by key."""

from __future__ import annotations

import pytest
from stage_cases import (
    CONFIGS,
    TRAJECTORY,
    keys_of,
    offline,
    online,
    resolved,
)

from ebbflow.recipe.choices import (
    WINDOW_KEYS,
    AdvantagesConfig,
    ReferenceConfig,
    SamplerConfig,
    WindowConfig,
)
from ebbflow.recipe.optimizer_config import OptimizerConfig
from ebbflow.recipe.stages import OnlineStageConfig


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
