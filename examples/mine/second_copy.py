"""A rollout engine with a copy of the model of its own, as an engine in another process or library
has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan
from ebbflow.models import load_model
from ebbflow.models.base import Conditioning
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.rollouts.generate import Rollouts, generate_samples
from ebbflow.stage import StageContext
from ebbflow.training.policy import Policy


class SecondCopy:
    """Generates with the weights that were loaded last."""

    def __init__(self, ctx: StageContext, base: Path) -> None:
        self.model = load_model(base, ctx.recipe.model)
        self.micro_batch = ctx.config.micro_batch
        self.policy = Policy(self.model, ctx.recipe.policy, ctx.recipe.seed)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self.policy.assign_parameters(weights)

    def generate(
        self,
        conditioning: Conditioning,
        keys: SampleKeys,
        sampler: SamplerConfig,
        plan: Plan | None = None,
    ) -> tuple[Rollouts, np.ndarray]:
        rollouts = generate_samples(self.model, conditioning, keys, sampler, plan, self.micro_batch)
        return rollouts, self.model.decode_latents(rollouts.latents)

    def close(self) -> None:
        """Nothing to release: the copy goes with this object."""
