"""Which prompts the steps of an online stage train on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import numpy as np

from ebbflow.algorithms.advantages import Moments
from ebbflow.data import prompt_windows
from ebbflow.data.prompt_windows import PromptWindow, build_prompt_windows
from ebbflow.data.prompts import Prompt
from ebbflow.data.sampling import sample_prompts, shuffle_prompts
from ebbflow.online.workers import StageError
from ebbflow.recipe.online import CurriculumConfig
from ebbflow.seeding import derive_seed
from ebbflow.stage import StageContext
from ebbflow.training.stage_loop import StageState


class PromptSampler:
    """The prompts of every step: a function of the seed, the step and the stage's state, which
    checkpoints hold.

    Args:
        prompts: the training split.
        state: where the stage starts or resumes; a filter and a curriculum keep what they know
            there, and nobody else changes what they have there.

    Attributes:
        prompt_sets: (prompts, how many of them are in a step) of every set of ``prompts.mixture``;
            without one, of all prompts.
    """

    def __init__(
        self, ctx: StageContext, prompts: Sequence[Prompt], state: StageState | None = None
    ) -> None:
        self.ctx = ctx
        self.config = ctx.online_config
        # How many prompts of each set of ``prompts.mixture`` a step takes; empty without one.
        self.counts = ctx.branch_recipe.prompts.count_by_prompt_set(self.config.prompts_per_step)
        self.state = state or StageState()
        self.prompts = _choose_candidates(ctx, prompts)
        self._by_id = {prompt.prompt_id: prompt for prompt in self.prompts}
        self.prompt_sets = self._split_prompt_sets()

    @property
    def remaining_prompts(self) -> list[Prompt]:
        """The prompts that a step may take."""
        if self.state.kept_prompts is None:
            return self.prompts
        remaining = set(self.state.kept_prompts)
        return [prompt for prompt in self.prompts if prompt.prompt_id in remaining]

    def sample_batch(self, step: int) -> list[Prompt]:
        """The prompts of a step, all different.

        Raises:
            SamplingError: there are too few.
        """
        # A curriculum orders all prompts anew in each step, by weights. Otherwise steps walk
        # through a permutation, so that a prompt comes at most once in an epoch.
        if self.config.curriculum:
            return [
                prompt
                for part, count in self.prompt_sets
                for prompt in self._order_prompts(part, step)[:count]
            ]
        return [
            prompt
            for part, count in self.prompt_sets
            for prompt in sample_prompts(part, count, step, self.ctx.stage_seed)
        ]

    def sample_replacements(
        self, step: int, taken: Sequence[Prompt], varied: Collection[int]
    ) -> list[Prompt]:
        """Prompts for a step in place of those whose samples all score alike, as far as there are
        any left.

        Args:
            taken: all prompts of the step so far.
            varied: ids of those of them whose samples score differently.
        """
        used = {prompt.prompt_id for prompt in taken}
        replacements = []
        # Set by set, so that the mixture of a step stays what the recipe says.
        for part, count in self.prompt_sets:
            # Only groups that vary count: the others stay in the batch but teach nothing.
            missing = count - sum(prompt.prompt_id in varied for prompt in part)
            unused = [
                prompt for prompt in self._order_prompts(part, step) if prompt.prompt_id not in used
            ]
            replacements += unused[: max(missing, 0)]
        return replacements

    def list_candidates(self, step: int) -> list[Prompt]:
        """List the prompts that a step may take, its refills included.

        Without a curriculum it takes no others. With one it seldom does.
        """
        # Not by the rewards of now: a stage that resumes in the middle of a window has others than
        # those with which the window began, and has to encode the same prompts.
        if self.config.curriculum:
            return [
                prompt
                for part, count in self.prompt_sets
                for prompt in shuffle_prompts(part, step, self.ctx.stage_seed, np.ones(len(part)))[
                    : self.config.candidates_per_prompt * count
                ]
            ]
        candidates = self.sample_batch(step)
        # No group of any round varies.
        for _ in range(self.config.refill_rounds):
            candidates += self.sample_replacements(step, candidates, ())
        return candidates

    def list_windows(self) -> list[PromptWindow]:
        """List the runs of steps whose prompts are encoded together; none before a
        ``prompt_filter`` has chosen from more prompts than a window has.
        """
        if self.config.prompts_depend_on_rewards:
            # One window for all steps: no choice is too late for it.
            if len(self.prompts) <= prompt_windows.PROMPTS_PER_WINDOW:
                return [PromptWindow(range(self.config.steps), lambda: self.prompts)]
            if self.config.prompt_filter and self.state.kept_prompts is None:
                return []
            return self._list_candidate_windows()
        return build_prompt_windows([self.sample_batch(step) for step in range(self.config.steps)])

    def _list_candidate_windows(self) -> list[PromptWindow]:
        """List windows of as many steps as surely fit: candidates are found by an order of all
        prompts for each step, so they are listed window by window.
        """
        candidates_per_step = self.config.prompts_per_step * self.config.candidates_per_prompt
        length = max(1, prompt_windows.PROMPTS_PER_WINDOW // candidates_per_step)
        steps = range(self.config.steps)
        windows = [steps[start : start + length] for start in steps[::length]]
        return [
            PromptWindow(window, partial(self._list_candidates_of_steps, window))
            for window in windows
        ]

    def _list_candidates_of_steps(self, steps: range) -> list[Prompt]:
        return [prompt for step in steps for prompt in self.list_candidates(step)]

    def find_prompts(self, ids: Sequence[int]) -> list[Prompt]:
        """Prompts by their ids, in this order."""
        return [self._by_id[prompt_id] for prompt_id in ids]

    def filter_prompts(self, prompt_ids: np.ndarray, moments: Moments) -> None:
        """Leave out what ``prompt_filter`` does, given the rewards of its first pass.

        Raises:
            StageError: too few are left.
        """
        config = self.config.prompt_filter
        assert config is not None
        # Means and standard deviations are those of each prompt's samples, [P] each.
        low = -np.inf if config.min_reward is None else config.min_reward
        high = np.inf if config.max_reward is None else config.max_reward
        fits = (
            # Of a single scored sample there is no standard deviation.
            (moments.count > 1)
            & (low <= moments.mean)
            & (moments.mean <= high)
            & (moments.std >= config.min_std)
        )
        self.state.kept_prompts = prompt_ids[fits].tolist()
        self.prompt_sets = self._split_prompt_sets()
        too_small = [(len(part), count) for part, count in self.prompt_sets if len(part) < count]
        if too_small:
            left, wanted = too_small[0]
            found = f"{left} of {len(self.prompts)} prompts, and a step takes {wanted}"
            seen = f"means from {moments.mean.min():.4g} to {moments.mean.max():.4g}"
            raise StageError(
                f"prompt_filter leaves {found}. The first pass found {seen} and standard deviations"
                f" of at most {moments.std.max():.4g}; widen min_reward, max_reward or min_std"
            )
        # The first pass is a first look at the rewards, so the curriculum need not begin blind.
        if self.config.curriculum:
            self.update_curriculum(prompt_ids, moments)

    def update_curriculum(self, prompt_ids: np.ndarray, moments: Moments) -> None:
        """Follow the rewards of some groups: the stage has a ``curriculum``."""
        config = self.config.curriculum
        assert config is not None
        for prompt, mean, std in zip(
            prompt_ids.tolist(), moments.mean.tolist(), moments.std.tolist(), strict=True
        ):
            # A prompt that was never sampled starts at its first rewards, not at zero.
            earlier = self.state.prompt_rewards.get(prompt, (mean, std))
            running = [
                old + config.rate * (new - old)
                for old, new in zip(earlier, (mean, std), strict=True)
            ]
            self.state.prompt_rewards[prompt] = (running[0], running[1])

    def _split_prompt_sets(self) -> list[tuple[list[Prompt], int]]:
        # Once for all steps: a step does not look at every prompt again.
        left = self.remaining_prompts
        if not self.counts:
            return [(left, self.config.prompts_per_step)]
        return [
            ([prompt for prompt in left if prompt.source == name], count)
            for name, count in self.counts.items()
        ]

    def _order_prompts(self, prompts: Sequence[Prompt], step: int) -> list[Prompt]:
        curriculum = self.config.curriculum
        ids = [prompt.prompt_id for prompt in prompts]
        weights = compute_curriculum_weights(curriculum, ids, self.state) if curriculum else None
        return shuffle_prompts(prompts, step, self.ctx.stage_seed, weights)


def compute_curriculum_weights(
    config: CurriculumConfig, prompt_ids: Sequence[int], state: StageState
) -> np.ndarray:
    """How much each prompt counts when those of a step are drawn, float64 [N] in [floor, 1]."""
    # "spread" prefers prompts whose samples differ; otherwise the weight is the distance to the
    # best mean reward, so that hard prompts come more often.
    best = max((mean for mean, _ in state.prompt_rewards.values()), default=0.0)
    known = {
        prompt: std if config.weight == "spread" else best - mean
        for prompt, (mean, std) in state.prompt_rewards.items()
    }
    largest = max((known[prompt] for prompt in prompt_ids if prompt in known), default=0.0)
    # Nothing is known yet, or all prompts are alike: a division by zero otherwise.
    if largest == 0:
        return np.ones(len(prompt_ids))
    # A prompt that was never sampled weighs as much as the heaviest one, so that it comes soon.
    return np.array([known.get(prompt, largest) / largest for prompt in prompt_ids]).clip(
        min=config.floor
    )


def _choose_candidates(ctx: StageContext, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The training prompts, or those of them that the first pass of ``prompt_filter`` tries, by
    their ids.
    """
    config = ctx.online_config.prompt_filter
    if config is None or config.prompts is None:
        return list(prompts)
    chosen = shuffle_prompts(prompts, 0, derive_seed(ctx.stage_seed, "prompt_filter"))[
        : config.prompts
    ]
    return sorted(chosen, key=lambda prompt: prompt.prompt_id)
