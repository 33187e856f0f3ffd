"""Stages that cannot be: what the error says of each, and what would do; and their neighbours that
can be.
"""

from __future__ import annotations

import pytest
from stage_cases import (
    BYPASS,
    FORWARD,
    GRADIENT,
    STOCHASTIC,
    TRAJECTORY,
    offline,
    online,
    problem,
    resolved,
)

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
            stage | {"negative_gradient": False},
            "negative_gradient = False: the loss of",
            "is without guidance",
            "leave negative_gradient out",
        )
        for stage in (online(FORWARD[0]), online("dmd2"), online(guidance_in_loss=False))
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
