"""Which prompts a training step sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np

from ebbflow.seeding import Stream, make_generator

P = TypeVar("P")
MAX_PROMPT_SETS = 32
"""Permutations that are kept: the one of this epoch for each prompt set of a mixture."""


class SamplingError(Exception):
    """A step needs more prompts than there are."""


def sample_prompts(prompts: Sequence[P], count: int, step: int, seed: int) -> list[P]:
    """The ``count`` different prompts, or ids of prompts, of training step ``step``.

    Steps walk through a seeded permutation of the prompts, a new one when fewer than ``count`` are
    left, so a step never holds a prompt twice.

    Raises:
        SamplingError: there are fewer than ``count`` prompts.
    """
    if count > len(prompts):
        raise SamplingError(
            f"a step needs {count} different prompts and the training split has {len(prompts)};"
            " lower the stage's number of prompts or add prompts to prompts.source"
        )
    # A function of the step alone: an interrupted run continues with the prompts of its step. The
    # remainder of an epoch, fewer than ``count`` prompts, is dropped.
    epoch, position = divmod(step, len(prompts) // count)
    order = _permute_epoch(len(prompts), epoch, seed)
    return [prompts[index] for index in order[position * count : (position + 1) * count]]


@lru_cache(MAX_PROMPT_SETS)
def _permute_epoch(count: int, epoch: int, seed: int) -> np.ndarray:
    """Permute the prompts of an epoch once, for all of its steps: a million take 20 ms."""
    generator = make_generator(seed, prompt_id=0, sample=0, step=epoch, stream=Stream.PROMPTS)
    order = generator.permutation(count)
    order.flags.writeable = False  # every caller gets the same array
    return order


def sample_mixed_prompts(
    prompts: Sequence[P], sources: Sequence[str], counts: Mapping[str, int], step: int, seed: int
) -> list[P]:
    """``sample_prompts`` of every prompt set, one after another.

    Example:
        >>> sample_mixed_prompts([0, 1, 2, 3], ["a", "a", "b", "b"], {"a": 1, "b": 2}, 0, seed=0)
        [1, 3, 2]

    Args:
        sources: of each prompt its set.
        counts: prompts of each set in a step (``PromptsConfig.counts``).
    """
    sampled = []
    for name, count in counts.items():
        prompt_set = [
            prompt for prompt, source in zip(prompts, sources, strict=True) if source == name
        ]
        sampled += sample_prompts(prompt_set, count, step, seed)
    return sampled


def shuffle_prompts(
    prompts: Sequence[P], step: int, seed: int, weights: np.ndarray | None = None
) -> list[P]:
    """All prompts in a random order of training step ``step``, which has nothing to do with
    ``sample_prompts``.

    Args:
        weights: positive [N]: each place goes to one of the prompts that are left, with a
            probability in proportion to its weight (Efraimidis and Spirakis 2006); left out, all
            are alike.
    """
    # sample=1 tells this stream of random numbers from that of sample_prompts, which has 0.
    generator = make_generator(seed, prompt_id=0, sample=1, step=step, stream=Stream.PROMPTS)
    if weights is None:
        order = generator.permutation(len(prompts))
    else:
        # The smallest of exponential variables with rates w is that of i with probability
        # w_i / sum(w), and the others, given that, are as if it had never been there.
        order = np.argsort(generator.exponential(size=len(prompts)) / weights, kind="stable")
    return [prompts[index] for index in order]
