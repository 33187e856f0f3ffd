"""All errors of a recipe at once, each with its line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ebbflow.recipe.base import Locate
from ebbflow.recipe.recipe import Recipe

KEY = re.compile(r"[a-z_]+(?:\.[\w-]+)*")
"""A key at the beginning of a message."""
LIBRARY = "ebbflow"
"""The package whose errors explain themselves. Any other error is a defect, and ends the check."""


class RecipeProblems:
    """The errors of checks that do not depend on each other.

    Example:
        Both checks are made, and one error has the messages of both::

            problems = RecipeProblems(locate)
            with problems.collect("output"):
                check_output_folder(recipe.output)
            with problems.collect("prompts"):
                table = read_prompt_table(recipe)
            problems.raise_all()
    """

    def __init__(self, locate: Locate) -> None:
        self._locate = locate
        self._errors: list[tuple[str, Exception]] = []
        self._failed: set[str] = set()

    @contextmanager
    def collect(self, key: str) -> Iterator[None]:
        """Keep an error of the block for later.

        Args:
            key: where the recipe is wrong, unless the message begins with a key.
        """
        try:
            yield
        except Exception as error:
            if type(error).__module__.partition(".")[0] != LIBRARY:
                raise
            # What two checks need may fail in both.
            if str(error) not in map(str, (earlier for _, earlier in self._errors)):
                self._errors.append((key, error))
            self._failed.add(key)

    def has(self, key: str) -> bool:
        """Return whether a check of this key failed."""
        return key in self._failed

    def raise_all(self) -> None:
        """Raise what was kept as one error of the type of the first, a line for each.

        Raises:
            Exception: a check failed.
        """
        messages = [self._describe(key, error) for key, error in self._errors]
        if not messages:
            return
        _, first = self._errors[0]
        text = "\n".join(messages)
        # As it was raised, with its cause, where nothing has to be added.
        raise first if text == str(first) else type(first)(text)

    def _describe(self, key: str, error: Exception) -> str:
        """Write a message with the line of the key that it names."""
        message = str(error)
        match = KEY.match(message)
        if match and match[0].partition(".")[0] in Recipe.model_fields:
            key = match[0]
        parts = [int(part) if part.isdigit() else part for part in key.split(".")]
        return f"{self._locate(tuple(parts))}{message}"
