"""The text of a failed task that Flyte's console shows: it begins with what a user has to read.

flytekit begins it with ``Trace:`` and the frames of its own code, and the console's box shows the
beginning. For a recipe with a mistake, typed into the launch form, these are 90 lines that end in
a dump of the whole recipe.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from ebbflow.recipe import RecipeError

ENTRYPOINT = "flytekit.bin.entrypoint"
"""The module of ``pyflyte-execute``, which writes error.pb."""


def put_messages_first() -> None:
    """Let ``pyflyte-execute`` begin the text of an error with its message: it formats the text
    itself, and nothing can name another format.
    """
    # Loaded in pods alone.
    entrypoint: Any = sys.modules.get(ENTRYPOINT)
    # A forked process may have imported ``tasks`` before.
    if entrypoint and not isinstance(entrypoint.get_traceback_str, MessageFirst):
        entrypoint.get_traceback_str = MessageFirst(entrypoint.get_traceback_str)


class MessageFirst:
    """Formats an error with its message in front of flytekit's text."""

    def __init__(self, format_trace: Callable[[Exception], str]) -> None:
        self.format_trace = format_trace

    def __call__(self, error: Exception) -> str:
        # flytekit wraps what a task raises, and what reading its inputs raises.
        raised = getattr(error, "value", error)
        # A mistake in a recipe is not in the code: its message names key, value and fix. It may
        # also stand behind flytekit's own error about an input, but behind no other one.
        is_about_input = type(raised).__module__.startswith("flytekit.")
        for link in _iterate_causes(raised):
            if isinstance(link, RecipeError) and (link is raised or is_about_input):
                return str(link)
        return f"{type(raised).__name__}: {raised}\n\n{self.format_trace(error)}"


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """Iterate over an error and those that led to it."""
    link: BaseException | None = error
    while link is not None:
        yield link
        # flytekit raises its error about an input while it handles ours, without naming a cause. An
        # error that is raised ``from None`` has no earlier one to tell of.
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
