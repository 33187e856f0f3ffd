"""Random streams as a function of (run seed, prompt_id, sample, step) and of nothing else.

Philox is a counter-based generator: the key holds the run and the prompt, the counter the sample and the step. No state is
carried between draws, so batch size, rank and engine cannot change a draw, and a resumed run needs no saved state.
"""

from __future__ import annotations

import hashlib
import json
from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """Independent uses of random numbers; they never share a draw."""

    ROLLOUT = 0
    TRAINING = 1
    PROMPTS = 2
    WINDOWS = 3
    ORDER = 4
    SIGMAS = 5


def generator(seed: int, prompt_id: int, sample: int, step: int, stream: Stream = Stream.ROLLOUT) -> np.random.Generator:
    """The generator of one (seed, prompt_id, sample, step, stream); all of them non-negative integers below 2^63."""
    # The first counter word advances while drawing; the others say whose draw it is.
    key = np.array([seed, prompt_id], dtype=np.uint64)
    counter = np.array([0, step, sample, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A seed for one purpose of a run (a stage, the evaluation), 63 bits, the same on every machine."""
    digest = hashlib.sha256(json.dumps([seed, *purpose]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def permutation(count: int, seed: int) -> list[int]:
    """The numbers below ``count`` in an order that depends on the seed alone.

    Sorting raw random numbers: the bit stream of Philox is fixed for good, numpy's own permutation may change.
    """
    order: list[int] = np.argsort(np.random.Philox(key=seed).random_raw(count), kind="stable").tolist()
    return order
