"""What the tests of the engine share: one base model and one policy, behind the engine and behind
the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ebbflow.data.images import encode_pngs
from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import SampleKeys
from ebbflow.models import Conditioning
from ebbflow.recipe.families import FAMILIES
from ebbflow.rollouts.generate import Diffusers
from ebbflow.rollouts.vllm_omni import VllmOmni
from ebbflow.stage import StageContext
from ebbflow.training.policy import Policy

TEXTS = [
    "two cats",
    "a red bicycle leans against a blue wall",
    'a sign that says "OPEN"',
    "snow",
    "a boat on a lake",
]
KEYS = SampleKeys(3, [4, 4, 5, 6, 6], [0, 1, 0, 2**40, 7])


@dataclass(frozen=True)
class Both:
    """The engine and the reference of one base model, with one policy that both are given."""

    ctx: StageContext
    engine: VllmOmni
    reference: Diffusers
    policy: Policy

    @property
    def conditioning(self) -> Conditioning:
        images: list[bytes | None] = [None] * len(TEXTS)
        if FAMILIES[self.ctx.recipe.model.family].edits_images:
            pixels = np.random.default_rng(0).integers(0, 256, (len(TEXTS), 64, 64, 3), np.uint8)
            images = list(encode_pngs(pixels))
        prompts = [
            Prompt(index, text, "blurry, low quality", None, "test", "train", "{}", image)
            for index, (text, image) in enumerate(zip(TEXTS, images, strict=True))
        ]
        return self.policy.model.encode_prompts(prompts)

    def change(self, seed: int, scale: float = 1.0) -> None:
        """Draw another policy from a seed; with scale 0, the base model."""
        self.policy.assign_parameters(self.policy.copies["reference"])
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.policy.parameters.items():
                moves = "lora_B" in name or self.ctx.recipe.policy.train == "full"
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(
                    noise, alpha=scale * (0.2 if "lora_B" in name else 0.02) if moves else 0
                )

    def push(self) -> None:
        self.engine.load(
            {name: parameter.detach() for name, parameter in self.policy.parameters.items()}
        )
