"""Rows of losses on the gradient of the reward: the last steps of the sampler once more, with
gradient, and scored.

The steps before are repeated without gradient under the policy as it is, so every update is on
samples of its own policy, whatever engine and version generated those that were scored. That costs
as many passes as there are such steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ebbflow.algorithms.base import CopyName, GradientRows
from ebbflow.data.prompts import Prompt
from ebbflow.flow.host_values import derive, expand_sigma, to_device
from ebbflow.flow.noise import SampleKeys, generate_initial_noise
from ebbflow.flow.sampler import compute_transition
from ebbflow.models.base import Conditioning, Model, predict, predict_checkpointed
from ebbflow.training.batches import ForwardInputs, split_into_passes

Score = Callable[[Tensor, Sequence[Prompt], Callable[[Tensor], Tensor]], Tensor]
"""From final latents, their prompts and what decodes them (``Model.decode_with_gradient``) to the
reward of each with gradient, [M].
"""


@dataclass(frozen=True)
class GradientBatch:
    """One row per sample, before the denoising step ``step``, the first with gradient.

    Example: a sampler of 10 steps whose last two have a gradient: ``step`` is 8, ``inputs.latents``
    are those before step 8, the update predicts the velocity there, and ``build_rows`` gives the
    loss a function that takes steps 8 and 9 from it.
    """

    inputs: ForwardInputs
    weight: Tensor
    group_index: Tensor
    advantage: Tensor
    keys: SampleKeys
    prompts: Sequence[Prompt]
    sigmas: Tensor
    step: int
    model: Model
    score: Score

    def inputs_of(self, copy: CopyName) -> ForwardInputs:
        return self.inputs

    def build_rows(
        self, part: slice, velocity: Tensor, copies: Mapping[CopyName, Tensor]
    ) -> GradientRows:
        return GradientRows(
            latents=self.inputs.latents[part],
            sigma=self.inputs.sigma[part],
            velocity=velocity,
            denoise=partial(self._denoise_remaining_steps, part),
            reward=partial(self._compute_reward, part),
            copies=copies,
            advantage=self.advantage[part],
        )

    def describe_row(self, row: int) -> str:
        sample = f"prompt {self.keys.prompt_ids[row]}, sample {self.keys.samples[row]}"
        return (
            f"{sample}, denoising step {self.step} (sigma {float(self.inputs.sigma[row]):.4f}) and"
            " its reward"
        )

    def _denoise_remaining_steps(self, part: slice, velocity: Tensor) -> Tensor:
        latents, _, conditioning = self.inputs.model_arguments(part)
        # The first step has the update's own prediction; only the steps after it are predicted
        # here. They are recomputed in the backward pass: each would keep all its activations.
        latents = _euler_step(latents, velocity, self.sigmas, self.step)
        for step in range(self.step + 1, len(self.sigmas) - 1):
            sigma = expand_sigma(self.sigmas, step, len(latents))
            latents = _euler_step(
                latents,
                predict_checkpointed(self.model, latents, sigma, conditioning),
                self.sigmas,
                step,
            )
        return latents

    def _compute_reward(self, part: slice, latents: Tensor) -> Tensor:
        return self.score(latents, self.prompts[part], self.model.decode_with_gradient)


def build_gradient_batch(
    model: Model,
    conditioning: Conditioning,
    advantage: Tensor,
    keys: SampleKeys,
    prompts: Sequence[Prompt],
    sigmas: Tensor,
    first_step: int,
    steps_with_gradient: int,
    score: Score,
    passes: int,
) -> GradientBatch:
    """Build a row for each of N samples, with the latents that the policy reaches before
    ``first_step``.

    Args:
        conditioning, advantage, keys, prompts: of the N samples.
        sigmas: the sampler's schedule, [steps + 1].
        steps_with_gradient: of the loss; where it is more than one, each is repeated in the
            backward pass.
        passes: forward passes that the samples are split into at each step, the same number on
            every process.
    """
    device = conditioning.device
    group_index = torch.arange(len(keys))
    sigmas = to_device(sigmas, device)
    latents = [
        _denoise_until_step(
            model, conditioning.select_rows(part), keys.select_samples(part), sigmas, first_step
        )
        for part in split_into_passes(group_index, passes)
    ]
    inputs = ForwardInputs(
        latents=torch.cat(latents),
        sigma=derive(lambda values: values[first_step].repeat(len(keys)), sigmas),
        conditioning=conditioning,
        sample_index=to_device(group_index, device),
        checkpointed=steps_with_gradient > 1,
    )
    weight = torch.ones(len(keys), device=device)
    group_index = group_index.to(device)
    return GradientBatch(
        inputs, weight, group_index, advantage, keys, prompts, sigmas, first_step, model, score
    )


@torch.no_grad()
def _denoise_until_step(
    model: Model, conditioning: Conditioning, keys: SampleKeys, sigmas: Tensor, first_step: int
) -> Tensor:
    """Return the latents that the policy reaches before a step of its deterministic sampler, [N,
    ...].
    """
    latents = generate_initial_noise(model.latent_shape, keys).to(conditioning.device)
    for step in range(first_step):
        velocity = predict(model, latents, expand_sigma(sigmas, step, len(keys)), conditioning)
        latents = _euler_step(latents, velocity, sigmas, step)
    return latents


def _euler_step(latents: Tensor, velocity: Tensor, sigmas: Tensor, step: int) -> Tensor:
    return compute_transition("ode", latents, velocity, sigmas, step).mean
