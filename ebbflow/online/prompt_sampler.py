"""Which prompts the steps of an online stage train on."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ebbflow.data.prompts import Prompt
from ebbflow.data.sampling import prompt_batch, random_order
from ebbflow.stage import StageContext


class PromptSampler:
    """The prompts of every step: a function of the seed and the step.

    Args:
        prompts: the training split.
    """

    def __init__(self, ctx: StageContext, prompts: Sequence[Prompt]) -> None:
        self.ctx, self.config, self.prompts = ctx, ctx.online, prompts

    def batch(self, step: int) -> list[Prompt]:
        """The prompts of a step, all different.

        Raises:
            SamplingError: there are too few.
        """
        return prompt_batch(self.prompts, self.config.prompts_per_step, step, self.ctx.seed)

    def further(self, step: int, taken: Sequence[Prompt], varied: Collection[int]) -> list[Prompt]:
        """Prompts for a step in place of those whose samples all score alike, as far as there are any left.

        Args:
            taken: all prompts of the step so far.
            varied: ids of those of them whose samples score differently.
        """
        used = {prompt.prompt_id for prompt in taken}
        left = [prompt for prompt in random_order(self.prompts, step, self.ctx.seed) if prompt.prompt_id not in used]
        return left[: max(self.config.prompts_per_step - len(varied), 0)]

    def all_steps(self) -> list[Prompt]:
        """Every prompt that some step may take, those of the first steps first."""
        if self.config.refill_rounds:
            return list(self.prompts)
        return [prompt for step in range(self.config.steps) for prompt in self.batch(step)]
