"""The prompts of a recipe outside of a run, on one machine."""

from __future__ import annotations

import logging

import pyarrow as pa

from ebbflow.data.prepare import prepare_prompt_table
from ebbflow.data.prompts import PromptError
from ebbflow.recipe import Recipe
from ebbflow.recipe.paths import resolve_local_path

logger = logging.getLogger(__name__)


def prepare_local_prompts(recipe: Recipe) -> pa.Table:
    """Prepare the prompts (schema ``PROMPTS``) as a run of the recipe does, from local files.

    Raises:
        PromptError: as ``prepare_prompt_table``, or a source is behind a URI or does not exist.
    """
    held_out = recipe.prompts.held_out_source
    sources = [*recipe.prompts.source_files, *filter(None, [held_out])]
    for source in sources:
        # Tasks download what is behind a URI; a command on one machine does not.
        if "://" in source:
            raise PromptError(
                f"{source} is behind a URI; download it, and name the local file in the recipe"
            )
        if not resolve_local_path(source).is_file():
            raise PromptError(f"{source}: no such file next to the recipe or here")
    table, report = prepare_prompt_table(
        recipe,
        *map(resolve_local_path, recipe.prompts.source_files),
        held_out=resolve_local_path(held_out) if held_out else None,
    )
    logger.info("%s", report)
    return table
