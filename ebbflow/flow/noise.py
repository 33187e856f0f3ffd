"""Noise as a function of (run seed, prompt_id, sample, denoising step) and of nothing else.

The generators behind it, and why they need no saved state: ``ebbflow.seeding``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ebbflow.flow.latents import NamedLatents
from ebbflow.seeding import Stream, iterate_generators

# The step index of x_T; the noise injected at denoising step i has the index i + 1.
INITIAL = 0


@dataclass(frozen=True)
class SampleKeys:
    """Which samples to generate; with the seed they fix all noise.

    Example:
        Prompts 3 and 8 with two samples each: SampleKeys(11, prompt_ids=[3, 3, 8, 8], samples=[0,
        1, 0, 1]). With ``sharing`` = [2] both samples of a prompt start from the noise of sample 0
        and have noise of their own at every step. A tree of 4 samples that splits in two at the
        first step and again at the second has ``sharing`` = [4, 2].

    Attributes:
        seed: the noise seed of the stage (``derive_seed``).
        prompt_ids: [N].
        samples: [N], the number of the sample among those of its prompt.
        sharing: for each step index of noise, how many samples of a prompt with successive numbers
            have one noise, that of the first of them; 1 beyond its end. Each number divides the one
            before it.
    """

    seed: int
    prompt_ids: Sequence[int]
    samples: Sequence[int]
    sharing: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @staticmethod
    def number_groups(
        seed: int,
        prompt_ids: Sequence[int],
        group_size: int,
        first_sample: int = 0,
        sharing: Sequence[int] = (),
    ) -> SampleKeys:
        """Give each of some prompts a group of samples, numbered from ``first_sample``."""
        numbers = range(first_sample, first_sample + group_size)
        return SampleKeys(
            seed,
            [prompt_id for prompt_id in prompt_ids for _ in numbers],
            [number for _ in prompt_ids for number in numbers],
            sharing,
        )

    @staticmethod
    def join_keys(parts: Sequence[SampleKeys]) -> SampleKeys:
        """Join the keys of parts that have the same seed and sharing."""
        prompt_ids = [prompt_id for part in parts for prompt_id in part.prompt_ids]
        samples = [sample for part in parts for sample in part.samples]
        return replace(parts[0], prompt_ids=prompt_ids, samples=samples)

    def find_noise_owners(self, index: int) -> list[int]:
        """Return the sample whose noise with a step index each sample has, [N]."""
        count = self.sharing[index] if index < len(self.sharing) else 1
        return self.find_first_siblings(count)

    def find_first_siblings(self, count: int) -> list[int]:
        """Return the first of each ``count`` samples with successive numbers, [N]."""
        # By number and not by position: a batch may hold any samples of a prompt, in any order.
        return [sample - sample % count for sample in self.samples]

    def select_samples(self, index: slice | np.ndarray) -> SampleKeys:
        """Return the keys at some positions, a slice or integer [S]."""
        # Python's integers, as in all keys, whatever the index is an array of.
        prompt_ids = np.array(self.prompt_ids, np.int64)[index].tolist()
        samples = np.array(self.samples, np.int64)[index].tolist()
        return replace(self, prompt_ids=prompt_ids, samples=samples)


def generate_noise(
    shape: Sequence[int],
    seed: int,
    prompt_ids: Sequence[int],
    samples: Sequence[int],
    step: int = INITIAL,
    stream: Stream = Stream.ROLLOUT,
) -> torch.Tensor:
    """Generate standard normal noise, float32 [N, *shape], independent for each (prompt_id,
    sample) and, of a sample with several latents, for each of them.
    """
    # numpy on the CPU, whatever the device: torch's generators give other numbers on a GPU, and
    # other ones for another shape of the batch.
    noise = np.empty((len(prompt_ids), *shape), dtype=np.float32)
    parts = [(slice(None), seed)]
    if isinstance(shape, NamedLatents):
        parts = shape.derive_noise_seeds(seed)
    for part, part_seed in parts:
        generators = iterate_generators(part_seed, prompt_ids, samples, step, stream)
        for row, generator in zip(noise, generators, strict=True):
            generator.standard_normal(dtype=np.float32, out=row[part])
    return torch.from_numpy(noise)


def generate_initial_noise(shape: Sequence[int], keys: SampleKeys) -> torch.Tensor:
    """Generate x_T of every sample, float32 [N, *shape]."""
    return generate_shared_noise(shape, keys, INITIAL)


def generate_shared_noise(shape: Sequence[int], keys: SampleKeys, index: int) -> torch.Tensor:
    """Generate the noise of every sample with a step index, as the keys share it, float32 [N,
    *shape].
    """
    # Samples that share a noise generate it again from its owner's key: no batch has to contain
    # the owner.
    owners = keys.find_noise_owners(index) if keys.sharing else keys.samples
    return generate_noise(shape, keys.seed, keys.prompt_ids, owners, index)
