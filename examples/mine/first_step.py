r"""A kind of rows: the first denoising step of each sample, where the network sees noise alone.

    L = A mean((v - (eps - x0))^2)   at sigma = 1

x0, eps: a sample and the noise that it came from. The policy repeats good samples from their noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ebbflow.algorithms.base import Algorithm, CopyName, RowMetrics, mean_per_row
from ebbflow.flow.noise import SampleKeys, generate_initial_noise
from ebbflow.recipe.algorithms import AlgorithmConfig
from ebbflow.training.batches import ForwardInputs, SampleGroups
from ebbflow.training.kinds.base import StepSamples, TrainableKind
from ebbflow.training.trial import TrialInputs


@dataclass(frozen=True)
class FirstStepRows:
    """What the loss gets: x0, eps and the predicted velocity, [M, ...]; advantages, [M]."""

    clean: Tensor
    noise: Tensor
    velocity: Tensor
    copies: Mapping[CopyName, Tensor]
    advantage: Tensor
    advantage_clip: float = 5.0


@dataclass(frozen=True)
class FirstStepBatch:
    """The rows of an update: where the network is evaluated, and what each row needs besides."""

    inputs: ForwardInputs
    weight: Tensor
    group_index: Tensor
    clean: Tensor
    advantage: Tensor
    keys: SampleKeys

    def inputs_of(self, copy: CopyName) -> ForwardInputs:
        return self.inputs

    def build_rows(
        self, part: slice, velocity: Tensor, copies: Mapping[CopyName, Tensor]
    ) -> FirstStepRows:
        return FirstStepRows(
            clean=self.clean[part],
            noise=self.inputs.latents[part],
            velocity=velocity,
            copies=copies,
            advantage=self.advantage[part],
        )

    def describe_row(self, row: int) -> str:
        sample = f"prompt {self.keys.prompt_ids[row]}, sample {self.keys.samples[row]}"
        return f"{sample}, its first step"


class FirstStepKind(TrainableKind):
    """One row for each sample, at sigma = 1, without classifier-free guidance."""

    name: ClassVar = "first_step"
    is_unguided: ClassVar = True

    def build_batch(
        self, step: StepSamples, groups: SampleGroups, passes: int
    ) -> tuple[FirstStepBatch, dict[str, float]]:
        samples = np.concatenate(groups)
        device = step.conditioning.device
        keys = step.keys.select_samples(samples)
        noise = generate_initial_noise(step.updater.policy.model.latent_shape, keys).to(device)
        rows = torch.arange(len(samples), device=device)
        ones = torch.ones(len(samples), device=device)
        conditioning = step.select_conditioning(samples).without_guidance()
        batch = FirstStepBatch(
            inputs=ForwardInputs(noise, ones, conditioning, rows),
            weight=ones,
            group_index=rows,  # each sample is a group of its own
            clean=step.latents[samples].to(device),
            advantage=step.select_advantages(samples),
            keys=keys,
        )
        return batch, {}

    def build_trial_rows(
        self, groups: list[np.ndarray], algorithm: Algorithm, hyper: Any
    ) -> tuple[FirstStepRows, Tensor]:
        inputs = TrialInputs.sample(groups)
        clean = inputs.sample_noise()
        noise = inputs.sample_noise()
        velocity = inputs.sample_noise().requires_grad_()
        return FirstStepRows(clean, noise, velocity, {}, inputs.advantage), velocity


class FirstStepConfig(AlgorithmConfig):
    """Regression of the first step on good samples."""

    kind: ClassVar = "mine.first_step:FIRST_STEP"
    stages: ClassVar = ("online",)


def compute_loss(rows: FirstStepRows, config: FirstStepConfig) -> tuple[Tensor, RowMetrics]:
    """Return loss and metrics of each row, [M]."""
    error = mean_per_row((rows.velocity - (rows.noise - rows.clean)) ** 2)
    return rows.advantage * error, {"first_step/error": error}


FIRST_STEP = FirstStepKind()
ALGORITHM = Algorithm(FirstStepConfig, compute_loss)
