"""Stages for the small models of the tests: defaults are the published ones, for models with fifty
times the latent elements.
"""

from __future__ import annotations

from typing import Any

SIX = {"name": "flow_sde", "steps": 6}
MOVING = {"kind": "progressive", "size": 3, "limit": 0.5, "steps_per_window": 10}
KL = {"weight": 0.02, "penalty": "kl"}
SMALL: dict[str, dict[str, Any]] = {
    "flow_grpo": {
        "algorithm": {"clip_range": 1e-3},
        "sampler": SIX,
        "window": {"kind": "all"},
        "reference": KL,
    },
    "flow_grpo_fast": {
        "algorithm": {"clip_range": 1e-3},
        "sampler": SIX | {"eta": 0.7},
        "window": {"kind": "random", "size": 2, "limit": 0.5},
    },
    "mix_grpo": {
        "shared_initial_noise": False,
        "algorithm": {"clip_range": 1e-3},
        "sampler": SIX,
        "window": MOVING,
        "advantages": {"std": "global"},
        "reference": KL,
    },
    "dance_grpo": {
        "shared_initial_noise": False,
        "algorithm": {"clip_range": 1e-3},
        "sampler": {"name": "dance_sde", "steps": 6},
    },
    "branch_grpo": {
        "algorithm": {"clip_range": 1e-3},
        "sampler": {"name": "dance_sde", "steps": 6},
        "tree": {"splits": [0, 1]},
    },
    "tempflow_grpo": {"algorithm": {"clip_range": 1e-3}, "sampler": SIX, "reference": KL},
    "gardo": {"algorithm": {"clip_range": 1e-3}, "sampler": SIX, "reference": {"weight": 0.02}},
    "grpo_guard": {"algorithm": {"clip_range": 1e-4}, "sampler": SIX},
    "flow_dppo": {"sampler": SIX, "window": MOVING, "advantages": {"clip": 5.0}},
    "diffusion_nft": {
        "algorithm": {"beta": 0.1, "noise_levels": 2, "old": {"slope": 0.09, "max_decay": 0.9}},
        "sampler": {"name": "ode", "steps": 6},
    },
    "awm": {"sampler": {"name": "ode", "steps": 6}, "reference": {"weight": 0.1}},
    "diffusion_dpo": {
        "algorithm": {"beta": 50.0, "noise_levels": 2, "pairs_share": 0.25},
        "sampler": {"name": "ode", "steps": 6},
    },
    "dgpo": {
        "algorithm": {"beta": 50.0, "noise_levels": 2, "clip_range": None},
        "sampler": {"name": "ode", "steps": 6},
        "advantages": {"std": "global"},
        "reference": {"weight": 0.0},
    },
    "crd": {
        "algorithm": {"noise_levels": 2},
        "reference": {"guidance": 1},
    },  # the glyph model has no guidance
    "sft": {"algorithm": {"noise_levels": 2}, "sampler": {"name": "ode", "steps": 6}},
    "refl": {"algorithm": {"weight": 1.0}, "sampler": {"name": "ode", "steps": 6}},
    "draft": {"sampler": {"name": "ode", "steps": 6}, "reference": {"weight": 0.0}},
    "srpo": {"sampler": {"name": "ode", "steps": 6}},
    "rwr": {"algorithm": {"noise_levels": 2}, "sampler": {"name": "ode", "steps": 6}},
}
"""By algorithm, the keys of a stage in which a small model wants other values than the published
defaults.
"""


def small_stage(stage: dict[str, Any]) -> dict[str, Any]:
    """The keys of a stage, with those of ``SMALL`` that it leaves out."""
    kind = stage.get("kind", "online")
    algorithm = stage.get("algorithm") or {
        "name": {"online": "mix_grpo"}.get(kind, "diffusion_nft")
    }
    small = {"optimizer": {"lr": 3e-4, "weight_decay": 0.0}} | SMALL.get(algorithm["name"], {})
    if kind == "online":
        small["updates_per_step"] = 2
    merged = small | stage | {"algorithm": algorithm}
    return merged | {
        key: _over(key, small[key], merged[key]) for key in small if isinstance(small[key], dict)
    }


def _over(block: str, small: dict[str, Any], given: Any) -> Any:
    """As a recipe's keys go over an algorithm's defaults: those of another sampler or window belong
    to it alone.
    """
    choice = {"sampler": "name", "window": "kind"}.get(block, "")
    if not isinstance(given, dict) or given.get(choice, small.get(choice)) != small.get(choice):
        return given
    return small | given
