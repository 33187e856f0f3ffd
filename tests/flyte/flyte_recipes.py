"""Changes of ``tiny`` for the executions of these tests."""

from __future__ import annotations

from typing import Any

from ebbflow.recipe.promotion import MarginsConfig
from tests.glyph_stages import small_stage

STEPS = 12
"""Of a stage whose pod is to be deleted in its middle."""
EVERY_STEP = {"checkpoints": {"every": 1}}
SHARE = {"cpus": 0.3}
"""What each worker of a Ray stage asks for: all of them fit on one small machine."""
QUICK: dict[str, Any] = {"optimizer": {"lr": 0.005, "weight_decay": 0.0}}
HELD_OUT = {"count": 64, "validation": 4, "held_out": 24}
"""Prompts: the gate decides on 24 held-out ones and more."""
ONLINE: dict[str, Any] = {
    "kind": "online",
    "steps": 2,
    "prompts_per_step": 4,
    "group_size": 8,
    "micro_batch": 32,
}
ON_RAY = ONLINE | {
    "placement": "ray",
    "resources": {"training": SHARE, "rollout": SHARE, "reward": SHARE},
}
OFFLINE: dict[str, Any] = {
    "kind": "offline",
    "prompts": 4,
    "shards": 2,
    "group_size": 4,
    "micro_batch": 8,
    "batch_size": 8,
    "epochs": 1,
}


def build_promotable_changes(*stages: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The changes of a recipe that the gate passes: its reward is learnt in a few steps, and moves
    what the image statistics measure.
    """
    return {
        "prompts": HELD_OUT,
        "rewards": [{"name": "jpeg_incompressibility"}],
        "guardrails": [],
        "promotion": {"margins": dict.fromkeys(MarginsConfig.model_fields)},
        "stages": [small_stage(stage | QUICK) for stage in stages],
    } | changes


def with_approval(changes: dict[str, Any]) -> dict[str, Any]:
    """The changes of a recipe, with the approval of a person, who has an hour."""
    return changes | {"promotion": changes["promotion"] | {"approval": 1}}
