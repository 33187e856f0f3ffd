"""Noise as a function of (run seed, prompt_id, sample, denoising step) and of nothing else.

Philox is a counter-based generator: the key holds the run and the prompt, the counter the sample and the step. No state is
carried between draws, so batch size, rank and engine cannot change a sample's noise, and a resumed run needs no saved state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

INITIAL = 0  # the step index of x_T; the noise injected at denoising step i has index i + 1


class Stream(IntEnum):
    """Independent uses of noise; they never share a draw."""

    ROLLOUT = 0
    TRAINING = 1
    PROMPTS = 2
    WINDOWS = 3
    ORDER = 4


@dataclass(frozen=True)
class SampleKeys:
    """Which samples to draw; with the seed they fix all noise.

    Attributes:
        seed: the noise seed of the stage (``derive_seed``).
        prompt_ids: [N].
        samples: [N], the number of the draw for its prompt.
    """

    seed: int
    prompt_ids: Sequence[int]
    samples: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @staticmethod
    def cat(parts: Sequence[SampleKeys]) -> SampleKeys:
        """The keys of all parts, which share their seed."""
        prompt_ids = [prompt_id for part in parts for prompt_id in part.prompt_ids]
        return SampleKeys(parts[0].seed, prompt_ids, [sample for part in parts for sample in part.samples])

    def rows(self, part: slice) -> SampleKeys:
        return SampleKeys(self.seed, self.prompt_ids[part], self.samples[part])

    def take(self, index: np.ndarray) -> SampleKeys:
        """The keys at some positions."""
        return SampleKeys(self.seed, [int(self.prompt_ids[i]) for i in index], [int(self.samples[i]) for i in index])


def generator(seed: int, prompt_id: int, sample: int, step: int, stream: Stream = Stream.ROLLOUT) -> np.random.Generator:
    """The generator of one (seed, prompt_id, sample, step, stream); all of them non-negative integers below 2^63."""
    # The first counter word advances while drawing; the others say whose draw it is.
    key = np.array([seed, prompt_id], dtype=np.uint64)
    counter = np.array([0, step, sample, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def noise(
    shape: Sequence[int],
    seed: int,
    prompt_ids: Sequence[int],
    samples: Sequence[int],
    step: int = INITIAL,
    stream: Stream = Stream.ROLLOUT,
) -> torch.Tensor:
    """Standard normal noise, float32 [N, *shape], one independent draw per (prompt_id, sample)."""
    draws = np.empty((len(prompt_ids), *shape), dtype=np.float32)
    for row, prompt_id, sample in zip(draws, prompt_ids, samples, strict=True):
        generator(seed, prompt_id, sample, step, stream).standard_normal(dtype=np.float32, out=row)
    return torch.from_numpy(draws)


def derive_seed(seed: int, *place: str | int) -> int:
    """A seed for one place of a run (a stage, the evaluation), 63 bits, stable across machines."""
    digest = hashlib.sha256(json.dumps([seed, *place]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
