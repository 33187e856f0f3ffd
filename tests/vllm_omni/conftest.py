"""The engine itself, on tiny models: nothing here runs without its environment (``make
test-vllm-omni`` makes it).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from vllm_omni_cases import Both

from ebbflow.models import load_model
from ebbflow.models.families.qwen_image_edit import QwenImageEditModel
from ebbflow.recipe import Recipe
from ebbflow.recipe.families import FAMILIES
from ebbflow.rollouts.generate import Diffusers
from ebbflow.rollouts.vllm_omni import VARIABLE, VllmOmni
from ebbflow.stage import StageContext
from ebbflow.training.policy import Policy


@pytest.fixture(scope="session", autouse=True)
def environment() -> None:
    """Skip, visibly, where there is no engine to test."""
    if VARIABLE not in os.environ:
        pytest.skip(
            f"{VARIABLE} is not set: `make test-vllm-omni` makes the engine's environment and runs"
            " these tests in it"
        )


@pytest.fixture(scope="session")
def context_of(tiny_recipe: Callable[..., Recipe]) -> Callable[..., StageContext]:
    """``place_of(family, train)``: an online stage with guidance, in micro-batches of three."""

    def make(family: str, train: str) -> StageContext:
        # A scale of its own for every family that takes one, and short prompts where they may be.
        model: dict[str, Any] = {"guidance": 4.0, "max_tokens": 32}
        if FAMILIES[family].edits_images:
            del model["max_tokens"]
        stage = {"kind": "online", "algorithm": {"name": "flow_grpo"}, "micro_batch": 3}
        policy = {"train": train, **({"rank": 4, "alpha": 12} if train == "lora" else {})}
        return StageContext(tiny_recipe(family, model, stages=[stage], policy=policy), 0, 0)

    return make


@pytest.fixture(scope="session")
def both(context_of: Callable[..., StageContext]) -> Iterator[Callable[[str, str], Both]]:
    """``both(family, train)``: opened once, for opening takes half a minute, and again after a test
    that ended it; every test pushes what it needs.
    """
    opened: dict[tuple[str, str], Both] = {}

    def get(family: str, train: str) -> Both:
        one = opened.get((family, train))
        if one is None or not one.engine._end.alive:
            ctx = context_of(family, train)
            base = Path(ctx.recipe.model.path or "")
            policy = Policy(load_model(base, ctx.recipe.model), ctx.recipe.policy, 0)
            opened[family, train] = Both(ctx, VllmOmni(ctx, base), Diffusers(ctx, policy), policy)
        return opened[family, train]

    # The pipeline scales images to edit to a megapixel, which takes minutes on a CPU.
    with patch.object(QwenImageEditModel, "edited_pixels", 64 * 64):
        yield get
    for one in opened.values():
        one.engine.close()
