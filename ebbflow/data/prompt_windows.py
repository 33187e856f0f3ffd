"""Runs of steps whose prompts are encoded together: the prompts of a long stage are never all
encoded at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ebbflow.data.prompts import Prompt

PROMPTS_PER_WINDOW = 8 * 512
"""Different prompts that are encoded together. They are eight files of
``models.encoding.PROMPTS_PER_FILE``, so that each GPU of a machine with eight encodes one. FLUX's
4,096 take 16 GiB of disk; 25,432 of PickScore's took 100.
"""


@dataclass(frozen=True)
class PromptWindow:
    """Steps in a row, and all prompts that any of them may take.

    Attributes:
        list_prompts: lists them, once they are to be encoded: to find those of every step of a long
            stage may take minutes, which would pass before its first.
    """

    steps: range
    list_prompts: Callable[[], list[Prompt]]


def split_into_windows(prompts_of_steps: Iterable[Collection[int]]) -> list[range]:
    """Split steps into runs of as many as have at most ``PROMPTS_PER_WINDOW`` different prompts. A
    step with more is a run of its own.

    Args:
        prompts_of_steps: the ids of the prompts of each step.

    Example:
        With four prompts a window, the third step adds two to the four of the first two::

            split_into_windows([[0, 1], [2, 3], [3, 4, 5], [4, 5]])  # [range(0, 2), range(2, 4)]
    """
    windows = []
    first = step = 0
    seen: set[int] = set()
    for step, ids in enumerate(prompts_of_steps):
        # The difference looks at the ids of the step alone, so that the time is linear in them.
        added = set(ids) - seen
        if seen and len(seen) + len(added) > PROMPTS_PER_WINDOW:
            windows.append(range(first, step))
            first = step
            seen = set(ids)
        else:
            seen |= added
    if seen:
        windows.append(range(first, step + 1))
    return windows


def build_prompt_windows(batches: Sequence[Sequence[Prompt]]) -> list[PromptWindow]:
    """Build the windows of steps that take these prompts."""
    ids_of_steps = ([prompt.prompt_id for prompt in batch] for batch in batches)
    return [
        PromptWindow(steps, partial(_join_batches, batches, steps))
        for steps in split_into_windows(ids_of_steps)
    ]


def _join_batches(batches: Sequence[Sequence[Prompt]], steps: range) -> list[Prompt]:
    return [prompt for step in steps for prompt in batches[step]]
