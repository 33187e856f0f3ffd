"""The denoising steps that are stochastic and those that are trained, and what a rollout records of
these: one plan per optimisation step, shared by every sample and rank.

A window per sample collapses training (a published pitfall), so nothing here takes a sample.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from ebbflow.recipe.choices import WindowConfig
from ebbflow.recipe.stages import OnlineStageConfig, StageConfig
from ebbflow.seeding import Stream, make_generator

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """What becomes of the denoising steps in one optimisation step.

    Example:
        With 10 denoising steps, Flow-GRPO-Fast's window of 2 steps may be Plan(stochastic=(3, 4),
        trained=(3, 4)). DanceGRPO's share of .6 is Plan(stochastic=(0, 1, ..., 8), trained=(0, 2,
        3, 5, 8)): the last step, 9, is in neither.

    Attributes:
        stochastic: the steps that follow the sampler, ascending, never empty, without the last one,
            whose noise would stay in the image; the others are deterministic.
        trained: those that are recorded and learnt from; ascending, never empty, among the
            stochastic ones.
        tail: after the last stochastic step, DPM-Solver++ takes this share of the remaining steps.
        with_means: whether the means of the trained steps are recorded, too.
    """

    stochastic: tuple[int, ...]
    trained: tuple[int, ...]
    tail: float | None = None
    with_means: bool = False


@dataclass(frozen=True)
class Trajectory:
    """The trained steps of a rollout, all of them stochastic; everything in fp32.

    Example:
        4 samples of Stable Diffusion 3 at 512 x 512 in 10 steps, of which 2, 3 and 4 are trained:
        ``sigmas`` [11], ``steps`` = [2, 3, 4], ``states`` [4, 4, 16, 64, 64], those before step 2
        and after each step, ``log_probs`` [4, 3]. Of the steps [2, 4] there would be as many
        states, before and after each.

    Attributes:
        sigmas: the whole schedule as it was used (a plan's tail shortens its end), [steps + 1].
        steps: integer [W], the trained denoising steps, ascending.
        states: [N, K, ...], the latents before and after the trained steps, each once: W + 1 where
            the steps are neighbours (``count_states``).
        log_probs: [N, W], under the policy that generated it; of samples of K latents [N, W, K].
        means: [N, W, ...], mu of the step under the policy that generated it, where the plan
            records means.
        weight: [N, W], of each step in the loss, and ``keep``, bool [N, W], whether it is trained:
            set by the rollout correction (``ebbflow.training.rollout_correction``), which may also
            put ``means`` and ``log_probs`` under the policy that trains. None, as recorded: every
            step counts the same.
    """

    sigmas: Tensor
    steps: Tensor
    states: Tensor
    log_probs: Tensor
    means: Tensor | None = None
    weight: Tensor | None = None
    keep: Tensor | None = None

    @property
    def latents(self) -> Tensor:
        """The latents before each trained step, [N, W, ...]: a copy, where ``states`` are not."""
        return self.states[:, self.find_states()]

    @property
    def next_latents(self) -> Tensor:
        """The latents after each trained step, [N, W, ...]: a copy."""
        return self.states[:, self.find_states() + 1]

    def find_states(self) -> Tensor:
        """Find the state before each trained step, integer [W]; the next one is that after it."""
        # Each step adds the state after it, and also the state before it where that is not the one
        # after another trained step.
        follows = self.steps.diff(prepend=self.steps[:1]) == 1
        return (2 - follows.long()).cumsum(0) - 2

    def list_columns(self) -> dict[str, Tensor]:
        """List the tensors by name: what is stored, sent and moved to another device."""
        return {name: values for name, values in vars(self).items() if values is not None}

    def select_samples(self, samples: Tensor) -> Trajectory:
        """Select some of the samples, integer [S]."""
        # ``sigmas`` and ``steps`` are those of all samples.
        return replace(
            self,
            states=self.states[samples],
            log_probs=self.log_probs[samples],
            means=None if self.means is None else self.means[samples],
        )


def plan_window(
    stage: StageConfig, seed: int, optimisation_step: int, with_means: bool
) -> Plan | None:
    """Plan the steps of an optimisation step as a stage says; None where its algorithm has no
    window.

    Args:
        seed: that of the stage.
        with_means: whether the loss of the algorithm compares means
            (``AlgorithmConfig.compares_means``).
    """
    if stage.window is None:
        return None
    # A tree can only split where noise makes the branches differ, so its splits are stochastic in
    # every window.
    tree = stage.tree if isinstance(stage, OnlineStageConfig) else None
    splits = tree.splits if tree else ()
    plan = plan_steps(stage.window, stage.sampler.steps, optimisation_step, seed, splits)
    return replace(plan, with_means=with_means)


def count_states(trained: Sequence[int]) -> int:
    """Count the latents before and after the trained steps, ascending, each of them once.

    Example:
        The steps 2, 3 and 4 have 4, the steps 0, 2 and 3 have 5.
    """
    num_runs = sum(step - 1 not in trained for step in trained)
    return len(trained) + num_runs


def plan_steps(
    window: WindowConfig,
    denoising_steps: int,
    optimisation_step: int,
    seed: int,
    splits: Sequence[int] = (),
) -> Plan:
    """Plan the steps of an optimisation step, for a window that fits into the denoising steps (the
    recipe has checked that).

    Args:
        splits: steps that are stochastic and trained besides a window of some steps.
    """
    # Without the last step: its noise would stay in the image.
    every = tuple(range(denoising_steps - 1))
    if window.kind == "all":
        return Plan(every, every, window.tail)
    if window.kind == "share":
        # DanceGRPO (2505.07818): the number is rounded down, as published, and at least one.
        count = max(1, int(window.share * len(every)))
        generator = _window_generator(optimisation_step, seed)
        trained = generator.choice(len(every), size=count, replace=False)
        return Plan(every, tuple(sorted(trained.tolist())), window.tail)
    start = _choose_window_start(window, denoising_steps, optimisation_step, seed)
    inside = tuple(sorted({*every[start : start + window.size], *splits}))
    return Plan(inside, inside, window.tail)


def count_samples_per_prediction(
    sharing: Sequence[int], steps: int, stochastic: Container[int], trained: Container[int]
) -> list[int]:
    """Count the successive samples of a prompt that the network predicts once at each denoising
    step, as they are equal before it.

    Where samples share their initial noise alone, training predicts a trained step for each of
    them, so rollouts do, too: in a pass with another number of rows the last bits may differ. Of a
    tree (``sharing`` goes on) training predicts each node once.

    Example:
        4 samples that share their initial noise, in 5 steps of which step 2 is stochastic and
        trained: [4, 4, 1, 1, 1]. A tree with ``sharing`` = [4, 2, 1] whose steps 0 and 1 are
        stochastic and trained: [4, 2, 1, 1, 1].

    Args:
        sharing: as in ``SampleKeys``.
    """
    counts = dict(enumerate(sharing))
    equal_samples = counts.get(0, 1)
    samples_per_prediction = []
    for step in range(steps):
        each_by_itself = step in trained and len(sharing) == 1
        samples_per_prediction.append(1 if each_by_itself else equal_samples)
        # The noise of a step has the index step + 1; samples that do not share it differ from now
        # on. Deterministic steps keep equal samples equal.
        if step in stochastic:
            equal_samples = min(equal_samples, counts.get(step + 1, 1))
    return samples_per_prediction


def _choose_window_start(
    window: WindowConfig, denoising_steps: int, optimisation_step: int, seed: int
) -> int:
    """Choose the first step of a window of some steps."""
    if window.kind == "fixed":
        return window.start
    # A window ends before the last denoising step at the latest.
    first_late_start = min(math.ceil(window.limit * denoising_steps), denoising_steps - window.size)
    starts = range(window.start, first_late_start, window.stride)
    if window.kind == "random":
        return int(_window_generator(optimisation_step, seed).choice(starts))

    # A moving window (MixGRPO, 2507.21802): each start in turn for as long as it stays. ``ends``
    # are the optimisation steps at which each is over. After the last it begins again, or stays
    # there.
    ends = list(
        accumulate(_count_steps_at_start(window, start, denoising_steps) for start in starts)
    )
    if window.roll_over:
        optimisation_step %= ends[-1]
    return starts[min(bisect_right(ends, optimisation_step), len(starts) - 1)]


def _count_steps_at_start(window: WindowConfig, start: int, denoising_steps: int) -> int:
    """Count the optimisation steps that a window stays at a start; ever fewer at late ones when it
    decays (MixGRPO, 2507.21802).
    """
    if window.kind == "progressive":
        return window.steps_per_window
    # ceil(n exp(-.1 relu(t - 13))) of 25 denoising steps, as published.
    decay_after = window.decay_after
    if decay_after is None:
        decay_after = math.ceil(denoising_steps / 2)
    decay = math.exp(-window.decay * max(start - decay_after, 0))
    return max(1, math.ceil(window.steps_per_window * decay))


def _window_generator(optimisation_step: int, seed: int) -> np.random.Generator:
    # In the place of the sample stands the optimisation step: every process has the same window,
    # and a resumed run needs no state.
    return make_generator(
        seed, prompt_id=0, sample=optimisation_step, step=0, stream=Stream.WINDOWS
    )


def shorten_schedule(sigmas: Tensor, share: float) -> Tensor:
    """Return a schedule of max(1, ceil(share * steps)) denoising steps instead of those of
    ``sigmas``, [steps + 1], from its first sigma to its last.

    They are spread evenly over its index, with linear interpolation, and so keep the family's
    spacing.
    """
    # MixGRPO-Flash (2507.21802): the steps after the window are fewer and of second order.
    steps = len(sigmas) - 1
    positions = np.linspace(0, steps, count_tail_steps(steps, share) + 1)
    return sigmas.new_tensor(np.interp(positions, np.arange(steps + 1), sigmas.cpu().numpy()))


def count_tail_steps(steps: int, share: float) -> int:
    """Count the denoising steps that are left of ``steps`` where a tail takes this share of
    them.
    """
    return max(1, math.ceil(share * steps))
