"""Where the prompts of a run come from, and how they are split."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from ebbflow.recipe.base import MAX_LENGTH, NAME, Strict, apportion_total
from ebbflow.recipe.paths import PathText


class PromptSetConfig(Strict):
    """One file of a mixture."""

    source: PathText
    """Same as ``prompts.source``."""
    name: str | None = Field(None, pattern=NAME, max_length=MAX_LENGTH)
    """Name of the set in the column ``source`` of the prompt table. Default: the name of the
    file."""
    weight: float = Field(1.0, gt=0)
    """Weight of this set in every step, relative to the other sets."""

    @property
    def prompt_set_label(self) -> str:
        """The name of the set in the prompt table."""
        return self.name or Path(self.source).name


class PromptsConfig(Strict):
    """Where prompts come from, and how they are split into training, validation and held-out
    prompts."""

    source: PathText | None = None
    """A .txt, .jsonl, .json, .csv, .tsv or .parquet file. Default: random strings for the glyph
    model. A relative path is looked up next to the recipe, then in the working directory, like all
    paths of a recipe. ``ebbflow:datasets/signs/prompts.txt`` is installed with Ebbflow, so every
    pod has it."""
    mixture: list[PromptSetConfig] = []
    """Several files instead of ``source``. Every step takes prompts from all of them, in proportion
    to their weights."""
    count: int = Field(2048, ge=3)
    """Number of random strings, if there is no ``source``."""
    validation: int = Field(64, ge=1)
    """Number of validation prompts, which choose the best round."""
    held_out: int = Field(128, ge=2)
    """Number of held-out prompts, which only the report and the promotion gate see."""
    held_out_source: PathText | None = None
    """A separate file for the held-out prompts, such as those of a benchmark. ``held_out`` prompts
    of the file are used, the same in every run. No stage trains on them. Validation prompts still
    come from the training set."""

    @property
    def source_files(self) -> list[str]:
        """The files that prompts come from; empty for random strings."""
        return [self.source] if self.source else [part.source for part in self.mixture]

    @property
    def prompt_set_labels(self) -> list[str]:
        """The names of the sets of the mixture."""
        return [part.prompt_set_label for part in self.mixture]

    def count_by_prompt_set(self, prompts: int) -> dict[str, int]:
        """Return how many of ``prompts`` prompts each set of the mixture has, by name.

        Example:
            >>> mixture = [{"source": "a.txt", "weight": 2}, {"source": "b.txt"}]
            >>> PromptsConfig(mixture=mixture).count_by_prompt_set(8)
            {"a.txt": 5, "b.txt": 3}
        """
        counts = apportion_total([part.weight for part in self.mixture], prompts)
        return {
            part.prompt_set_label: count for part, count in zip(self.mixture, counts, strict=True)
        }

    @model_validator(mode="after")
    def _check_file_or_mixture(self) -> PromptsConfig:
        if self.source and self.mixture:
            raise ValueError(
                "source and mixture both name files; add the first to the second, or leave one out"
            )
        names = self.prompt_set_labels
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            raise ValueError(f"mixture has {duplicates[0]} twice; give one of them another name")
        return self

    @model_validator(mode="after")
    def _check_training_prompts_remain(self) -> PromptsConfig:
        # Held-out prompts of a file of their own take nothing from the training prompts.
        taken = self.validation + (0 if self.held_out_source else self.held_out)
        if not self.source_files and taken >= self.count:
            names = "validation" if self.held_out_source else "validation + held_out"
            raise ValueError(
                f"{names} = {taken} leaves nothing of count = {self.count} to train on"
            )
        return self

    @model_validator(mode="after")
    def _check_held_out_file_has_number(self) -> PromptsConfig:
        # A default would evaluate a part of a benchmark, and its scores would compare with no
        # published ones.
        if self.held_out_source and "held_out" not in self.model_fields_set:
            raise ValueError(
                "held_out_source needs held_out, the number of its prompts to evaluate: all of them"
                " for a benchmark"
            )
        return self
