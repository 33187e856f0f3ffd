"""What an online stage asks of a rollout engine, and the reference one: diffusers in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from torch import Tensor

from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan
from ebbflow.models.base import Conditioning, device_of
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.rollouts.generate import Rollouts, generate
from ebbflow.stage import StageContext
from ebbflow.training.policy import Policy


class Engine(Protocol):
    """A base model with the weights that were loaded last; noise is a function of the keys in every engine."""

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take over the trained parameters: all of them by name (``Policy.parameters``), float32, whole, on the CPU."""

    def generate(
        self, conditioning: Conditioning, keys: SampleKeys, sampler: SamplerConfig, plan: Plan | None = None
    ) -> tuple[Rollouts, np.ndarray]:
        """One sample per row, as ``ebbflow.rollouts.generate.generate``: (rollouts, their images or videos)."""

    def close(self) -> None:
        """Let go of what the engine holds outside this process."""


class Diffusers:
    """The reference engine: the model of this process and our own denoising loop.

    Args:
        policy: the parameters that generate; where the trainer's own policy is given, nothing has to be loaded.
        generates: which copy of the policy rolls out.
    """

    def __init__(self, ctx: StageContext, policy: Policy, generates: str = "current") -> None:
        self.policy = policy
        self.generates = generates
        self.micro_batch = ctx.config.micro_batch
        self.precision = ctx.config.rollout_precision

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self.policy.assign(weights)

    def generate(
        self, conditioning: Conditioning, keys: SampleKeys, sampler: SamplerConfig, plan: Plan | None = None
    ) -> tuple[Rollouts, np.ndarray]:
        model = self.policy.model
        conditioning = conditioning.to(device_of(model))
        with self.policy.using(self.generates):
            rollouts = generate(model, conditioning, keys, sampler, plan, self.micro_batch, self.precision)
        # As many at once as were denoised: a convolution may take another kernel for another batch size, as on Intel CPUs.
        return rollouts, np.concatenate([model.decode(latents) for latents in rollouts.latents.split(self.micro_batch)])

    def close(self) -> None:
        """There is nothing outside this process."""
