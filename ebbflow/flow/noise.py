"""Noise as a function of (run seed, prompt_id, sample, denoising step) and of nothing else.

The generators behind it, and why they need no saved state: ``ebbflow.seeding``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ebbflow.seeding import Stream, iterate_generators

INITIAL = 0  # the step index of x_T; the noise injected at denoising step i has index i + 1


@dataclass(frozen=True)
class SampleKeys:
    """Which samples to draw; with the seed they fix all noise.

    Attributes:
        seed: the noise seed of the stage (``derive_seed``).
        prompt_ids: [N].
        samples: [N], the number of the draw for its prompt.
        sharing: for each step index of noise, how many samples of a prompt with successive numbers
            have one draw, that of the first of them; 1 beyond its end. Each number divides the one
            before it.
    """

    seed: int
    prompt_ids: Sequence[int]
    samples: Sequence[int]
    sharing: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @staticmethod
    def join_keys(parts: Sequence[SampleKeys]) -> SampleKeys:
        """The keys of all parts, which share their seed."""
        prompt_ids = [prompt_id for part in parts for prompt_id in part.prompt_ids]
        samples = [sample for part in parts for sample in part.samples]
        return replace(parts[0], prompt_ids=prompt_ids, samples=samples)

    def find_noise_owners(self, index: int) -> list[int]:
        """The sample whose draw with a step index is that of each sample, [N]."""
        return self.find_first_siblings(self.sharing[index] if index < len(self.sharing) else 1)

    def find_first_siblings(self, count: int) -> list[int]:
        """The first of each ``count`` samples with successive numbers, [N]."""
        return [sample - sample % count for sample in self.samples]

    def select_slice(self, part: slice) -> SampleKeys:
        return replace(self, prompt_ids=self.prompt_ids[part], samples=self.samples[part])

    def select_samples(self, index: np.ndarray) -> SampleKeys:
        """The keys at some positions."""
        prompt_ids, samples = (
            [int(values[i]) for i in index] for values in (self.prompt_ids, self.samples)
        )
        return replace(self, prompt_ids=prompt_ids, samples=samples)


def generate_noise(
    shape: Sequence[int],
    seed: int,
    prompt_ids: Sequence[int],
    samples: Sequence[int],
    step: int = INITIAL,
    stream: Stream = Stream.ROLLOUT,
) -> torch.Tensor:
    """Standard normal noise, float32 [N, *shape], one independent draw per (prompt_id, sample)."""
    draws = np.empty((len(prompt_ids), *shape), dtype=np.float32)
    for row, generator in zip(
        draws, iterate_generators(seed, prompt_ids, samples, step, stream), strict=True
    ):
        generator.standard_normal(dtype=np.float32, out=row)
    return torch.from_numpy(draws)


def generate_initial_noise(shape: Sequence[int], keys: SampleKeys) -> torch.Tensor:
    """x_T of every sample, float32 [N, *shape]."""
    return generate_shared_noise(shape, keys, INITIAL)


def generate_shared_noise(shape: Sequence[int], keys: SampleKeys, index: int) -> torch.Tensor:
    """The noise of every sample with a step index, as the keys share it, float32 [N, *shape]."""
    return generate_noise(shape, keys.seed, keys.prompt_ids, keys.find_noise_owners(index), index)
