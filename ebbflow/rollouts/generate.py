"""The reference rollout engine: diffusers' transformer in this process, our own denoising loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ebbflow.flow import transition as flow
from ebbflow.flow.noise import noise
from ebbflow.models.base import Conditioning, Model
from ebbflow.recipe.stages import Sampler


@dataclass(frozen=True)
class SampleKeys:
    """Which samples to draw; with the seed they fix all noise.

    Attributes:
        seed: the noise seed of the stage (``ebbflow.flow.noise.derive_seed``).
        prompt_ids: [N].
        samples: [N], the number of the draw for its prompt.
    """

    seed: int
    prompt_ids: Sequence[int]
    samples: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def rows(self, part: slice) -> SampleKeys:
        return SampleKeys(self.seed, self.prompt_ids[part], self.samples[part])

    def take(self, index: np.ndarray) -> SampleKeys:
        """The keys at some positions."""
        return SampleKeys(self.seed, [int(self.prompt_ids[i]) for i in index], [int(self.samples[i]) for i in index])


@dataclass(frozen=True)
class Trajectory:
    """The trained window of a rollout; all its steps are stochastic.

    Attributes:
        sigmas: the whole schedule, [steps + 1].
        steps: [W] denoising steps of the window, consecutive.
        latents: fp32 [N, W + 1, ...], from before the window's first step to after its last.
        log_probs: fp32 [N, W] under the policy that generated them.
    """

    sigmas: Tensor
    steps: Tensor
    latents: Tensor
    log_probs: Tensor


@dataclass(frozen=True)
class Rollouts:
    """Generated samples: final latents, fp32 [N, ...], and the trajectory window where one was asked for."""

    latents: Tensor
    trajectory: Trajectory | None


@torch.no_grad()
def generate(
    model: Model,
    conditioning: Conditioning,
    keys: SampleKeys,
    sampler: Sampler,
    window: range | None = None,
    micro_batch: int = 64,
) -> Rollouts:
    """Denoise one sample per row of ``conditioning``.

    With a window, its steps follow the sampler and are recorded, and all others are deterministic. Without one every step but
    the last follows the sampler and nothing is recorded. Micro-batches do not change a sample's noise; they can change the last
    bits of the arithmetic.
    """
    parts = [slice(start, start + micro_batch) for start in range(0, len(keys), micro_batch)]
    done = [_denoise(model, conditioning.rows(part), keys.rows(part), sampler, window) for part in parts]
    latents = torch.cat([latents for latents, _, _ in done])
    if window is None:
        return Rollouts(latents, None)
    device = latents.device
    trajectory = Trajectory(
        sigmas=model.sigmas(sampler.steps).to(device),
        steps=torch.tensor(list(window), device=device),
        latents=torch.cat([states for _, states, _ in done]),
        log_probs=torch.cat([log_probs for _, _, log_probs in done]),
    )
    return Rollouts(latents, trajectory)


def _denoise(
    model: Model, conditioning: Conditioning, keys: SampleKeys, sampler: Sampler, window: range | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(final latents, window states [N, W + 1, ...], window log-probs [N, W]) of one micro-batch; empty without a window."""
    device = conditioning.embeds.device
    sigmas = model.sigmas(sampler.steps).to(device)
    stochastic = _stochastic_steps(sampler) if window is None else window
    path, log_probs = [_noise(model, keys, step=0).to(device)], []
    for step in range(sampler.steps):
        latents = path[-1]
        velocity = model.velocity(latents, sigmas[step].expand(len(keys)), conditioning)
        if step not in stochastic:
            path.append(flow.transition("ode", latents, velocity, sigmas, step).mean)
            continue
        move = flow.transition(sampler.name, latents, velocity, sigmas, step, sampler.eta)
        path.append(flow.sample(move, _noise(model, keys, step + 1).to(device)))
        log_probs.append(flow.log_prob(move, path[-1]))
    if window is None:
        return path[-1], path[-1][:0], path[-1][:0]
    return path[-1], torch.stack(path[window.start : window.stop + 1], 1), torch.stack(log_probs, 1)


def _stochastic_steps(sampler: Sampler) -> range:
    """Every step of a stochastic sampler but the last, whose noise would stay in the image."""
    return range(0 if sampler.name == "ode" else sampler.steps - 1)


def _noise(model: Model, keys: SampleKeys, step: int) -> Tensor:
    return noise(model.latent_shape, keys.seed, keys.prompt_ids, keys.samples, step)
