"""Which denoising steps are stochastic and which are trained: one draw per optimisation step,
shared by every sample and rank.

A window per sample collapses training (a published pitfall), so nothing here takes a sample.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from ebbflow.recipe.choices import WindowConfig
from ebbflow.seeding import Stream, make_generator

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """What becomes of the denoising steps in one optimisation step.

    Attributes:
        stochastic: the steps that follow the sampler, ascending, never empty, without the last one,
            whose noise would stay in the image; the others are deterministic.
        trained: those that are recorded and learnt from; ascending, never empty, among the
            stochastic ones.
        tail: after the last stochastic step, DPM-Solver++ takes this share of the remaining steps.
    """

    stochastic: tuple[int, ...]
    trained: tuple[int, ...]
    tail: float | None = None


def plan_steps(
    window: WindowConfig,
    denoising_steps: int,
    optimisation_step: int,
    seed: int,
    splits: Sequence[int] = (),
) -> Plan:
    """The steps of this optimisation step, for a window that fits into the denoising steps (the
    recipe has checked that).

    Args:
        splits: steps that are stochastic, and trained, wherever a window of some steps is.
    """
    every = tuple(range(denoising_steps - 1))
    if window.kind == "all":
        return Plan(every, every, window.tail)
    if window.kind == "share":
        return Plan(
            every,
            _sample_share_of_steps(
                window.share, len(every), _window_generator(optimisation_step, seed)
            ),
            window.tail,
        )
    start = _choose_window_start(window, denoising_steps, optimisation_step, seed)
    inside = tuple(sorted({*every[start : start + window.size], *splits}))
    return Plan(inside, inside, window.tail)


def count_samples_per_prediction(
    sharing: Sequence[int], steps: int, stochastic: Container[int], trained: Container[int]
) -> list[int]:
    """How many successive samples of a prompt the network predicts once at each denoising step, as
    they are equal before it.

    Where samples share their initial noise alone, training predicts a trained step for each of
    them, so rollouts do, too: in a pass with another number of rows the last bits may differ. Of a
    tree (``sharing`` goes on) training predicts each node once.

    Args:
        sharing: as of ``SampleKeys``.
    """
    counts = dict(enumerate(sharing))
    equal = counts.get(0, 1)
    found = []
    for step in range(steps):
        found.append(1 if step in trained and len(sharing) == 1 else equal)
        if step in stochastic:
            equal = min(equal, counts.get(step + 1, 1))
    return found


def _sample_share_of_steps(share: float, count: int, draw: np.random.Generator) -> tuple[int, ...]:
    """A random share of the steps, rounded down as published, at least one (DanceGRPO,
    2505.07818)."""
    chosen = draw.choice(count, size=max(1, int(share * count)), replace=False)
    return tuple(sorted(chosen.tolist()))


def _choose_window_start(
    window: WindowConfig, denoising_steps: int, optimisation_step: int, seed: int
) -> int:
    if window.kind == "fixed":
        return window.start
    starts = range(
        window.start,
        min(math.ceil(window.limit * denoising_steps), denoising_steps - window.size),
        window.stride,
    )
    if window.kind == "random":
        return int(_window_generator(optimisation_step, seed).choice(starts))
    return _find_moving_start(window, starts, denoising_steps, optimisation_step)


def _find_moving_start(
    window: WindowConfig, starts: range, denoising_steps: int, optimisation_step: int
) -> int:
    """Each start in turn for as long as it stays; then from the first again, or the last for
    good."""
    ends = list(
        accumulate(_count_steps_at_start(window, start, denoising_steps) for start in starts)
    )
    if window.roll_over:
        optimisation_step %= ends[-1]
    return starts[min(bisect_right(ends, optimisation_step), len(starts) - 1)]


def _count_steps_at_start(window: WindowConfig, start: int, denoising_steps: int) -> int:
    """Optimisation steps that a window stays at a start; ever fewer for late ones when it decays
    (MixGRPO, 2507.21802).
    """
    if window.kind == "progressive":
        return window.steps_per_window
    after = math.ceil(denoising_steps / 2) if window.decay_after is None else window.decay_after
    return max(
        1, math.ceil(window.steps_per_window * math.exp(-window.decay * max(start - after, 0)))
    )


def _window_generator(optimisation_step: int, seed: int) -> np.random.Generator:
    return make_generator(
        seed, prompt_id=0, sample=optimisation_step, step=0, stream=Stream.WINDOWS
    )


def shorten_schedule(sigmas: Tensor, share: float) -> Tensor:
    """Return a schedule of max(1, ceil(share * steps)) denoising steps instead of those of
    ``sigmas``, [steps + 1], from its first sigma to its last.

    They are spread evenly over its index, with linear interpolation, and so keep the family's
    spacing.
    """
    steps = len(sigmas) - 1
    positions = np.linspace(0, steps, count_tail_steps(steps, share) + 1)
    return sigmas.new_tensor(np.interp(positions, np.arange(steps + 1), sigmas.cpu().numpy()))


def count_tail_steps(steps: int, share: float) -> int:
    """How many denoising steps are left of ``steps`` where a tail takes this share of them."""
    return max(1, math.ceil(share * steps))
