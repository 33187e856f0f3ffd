"""Which denoising steps are stochastic and trained: one draw per optimisation step, shared by every sample and rank.

A window per sample collapses training (a published pitfall), so nothing here takes a sample.
"""

from __future__ import annotations

import math

from ebbflow.flow.noise import Stream, generator
from ebbflow.recipe.stages import Window


def trained_steps(window: Window, denoising_steps: int, optimisation_step: int, seed: int) -> range:
    """The contiguous denoising steps of this optimisation step, never empty.

    The last denoising step is deterministic under every window: its noise would stay in the image.
    """
    stochastic = denoising_steps - 1
    if window.kind == "all":
        return range(stochastic)
    start = _start(window, denoising_steps, optimisation_step, seed)
    return range(start, min(start + window.size, stochastic))


def _start(window: Window, denoising_steps: int, optimisation_step: int, seed: int) -> int:
    last = min(math.ceil(window.limit * denoising_steps), denoising_steps - window.size) - 1
    choices = range(window.start, max(last, window.start) + 1, window.stride)
    if window.kind == "fixed":
        return window.start
    if window.kind == "random":
        draw = generator(seed, prompt_id=0, sample=optimisation_step, step=0, stream=Stream.WINDOWS)
        return int(draw.choice(choices))
    return choices[optimisation_step // window.steps_per_window % len(choices)]
