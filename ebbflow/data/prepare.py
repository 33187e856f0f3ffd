"""The prompt table of a run."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from ebbflow.data.prompts import make_glyph_prompts, read_prompt_file, require_targets, split_prompts
from ebbflow.recipe import Recipe

READING_REWARDS = {"ocr", "tesseract", "similarity"}
"""Rewards that compare an image with the prompt's target."""


def prepare(recipe: Recipe, source: Path | None) -> tuple[pa.Table, str]:
    """The prompt table (schema ``PROMPTS``), from a file or made up, and a sentence about it.

    Raises:
        PromptError: the file cannot be used, has too few prompts, or prompts without the text that a reward wants to read.
    """
    config = recipe.prompts
    if source is None:
        rows = make_glyph_prompts(config.count, recipe.model.training.letters, recipe.seed)
        report = f"{len(rows)} random strings made up"
    else:
        rows, imported = read_prompt_file(source)
        report = str(imported)
        if READING_REWARDS & {term.name for term in recipe.rewards.terms}:
            require_targets(rows, source)
    table = split_prompts(rows, config.validation, config.held_out, recipe.seed)
    trained = table.num_rows - config.validation - config.held_out
    return table, f"{report}; {trained} to train, {config.validation} to validate, {config.held_out} held out"
