"""A reward by which the samples of some prompts vary and those of others do not."""

from __future__ import annotations

from tests.conftest import Darkness


def ids(prompts):
    return [prompt.prompt_id for prompt in prompts]


class VariedReward(Darkness):
    """The samples of the prompts with these ids score differently."""

    def __init__(self, varied):
        self.varied = varied
        self.seen = []

    def __call__(self, images, prompts):
        result = super().__call__(images, prompts)
        result.values[[prompt.prompt_id not in self.varied for prompt in prompts]] = 0.5
        self.seen.append(sorted(set(ids(prompts))))
        return result
