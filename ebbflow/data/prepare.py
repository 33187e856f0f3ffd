"""From a recipe to the prompt table of its run, with the checks that the model and the rewards
need.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from ebbflow.data.prompt_files import read_prompt_file
from ebbflow.data.prompts import (
    PromptError,
    PromptRow,
    check_targets,
    format_count,
    make_glyph_prompts,
    split_prompts,
    split_with_held_out,
)
from ebbflow.recipe import Recipe
from ebbflow.recipe.families import find_family
from ebbflow.recipe.model import GlyphTrainingConfig, ModelConfig

MIN_JUDGED = 4
"""Validation prompts of a branch: two that choose among its policies, and two on which its gate
compares.
"""
MIN_COMPARED = 2
"""Held-out prompts that the gate needs to compare a metric."""


def prepare_prompt_table(
    recipe: Recipe, *files: Path, held_out: Path | None = None
) -> tuple[pa.Table, str]:
    """The prompt table (schema ``PROMPTS``) and a sentence about it.

    Args:
        files: of ``prompts.source``, or of ``prompts.mixture`` in its order; none makes random
            strings for the glyph model.
        held_out: of ``prompts.held_out_source``.

    Raises:
        PromptError: a file cannot be used, has too few prompts, or a prompt lacks the text that a
            reward reads or the image that the model edits.
    """
    config = recipe.prompts
    source = None
    if not files:
        training = recipe.model.training
        rows = make_glyph_prompts(
            config.count, training.letters, recipe.seed, training.alphabet_characters
        )
        report = f"{len(rows)} random strings"
    else:
        rows, report = (
            _read_mixture(recipe, files) if config.mixture else _read_single_file(files[0])
        )
        source = files[0].parent if config.mixture else files[0]  # as messages name it
        for view in (recipe, *map(recipe.select_branch, recipe.branches)):
            own = [
                row
                for row in rows
                if row.source in view.prompts.prompt_set_labels or not view.prompts.mixture
            ]
            _check_targets_of_rewards(view, own, source)
    _check_rows(recipe, rows, source)
    # The split of a file never depends on the run: a challenger must not train on prompts that
    # judged its champion.
    seed = 0 if source else recipe.seed
    if held_out:
        judged, of_judged = _read_single_file(held_out)
        _check_targets_of_rewards(recipe, judged, held_out)
        _check_rows(recipe, judged, held_out)
        table, shared = split_with_held_out(rows, judged, config.validation, config.held_out, seed)
        report += f"; {of_judged}" + (
            f"; {format_count(shared, 'prompt')} in both, not trained on" if shared else ""
        )
    else:
        table = split_prompts(rows, config.validation, config.held_out, seed)
    trained = table.num_rows - config.validation - config.held_out
    _check_number_of_prompts(recipe, trained)
    _check_size_of_each_set(recipe, table)
    _check_prompts_for_guardrails(recipe, table)
    for branch in recipe.branches:
        select_branch_prompts(recipe, table, branch)
    return (
        table,
        (
            f"{report}; {trained} to train, {config.validation} to validate, {config.held_out}"
            " held out"
        ),
    )


def _read_single_file(path: Path) -> tuple[list[PromptRow], str]:
    rows, report = read_prompt_file(path)
    return rows, str(report)


def _read_mixture(recipe: Recipe, files: Sequence[Path]) -> tuple[list[PromptRow], str]:
    """The prompts of all files; of those that several have, the first: one of them could be trained
    on and the other held out.
    """
    found: dict[tuple[str, str, str | None, bytes | None], PromptRow] = {}
    reports = []
    repeated = 0
    for part, file in zip(recipe.prompts.mixture, files, strict=True):
        rows, report = _read_single_file(file)
        reports.append(report)
        for row in rows:
            key = (row.prompt, row.negative_prompt, row.target, row.image)
            repeated += key in found
            found.setdefault(key, replace(row, source=part.prompt_set_label))
    return list(found.values()), "; ".join(
        [*reports, *([f"{repeated} in several files, taken from the first"] if repeated else [])]
    )


def _check_size_of_each_set(recipe: Recipe, table: pa.Table) -> None:
    trained = Counter(table.filter(pc.equal(table["split"], "train"))["source"].to_pylist())
    for index, stage in enumerate(recipe.stages):
        if stage.kind == "custom" or (stage.kind == "offline" and stage.pairs):
            continue
        own = recipe.select_branch(stage.branch).prompts
        for name, count in own.count_by_prompt_set(
            stage.prompts_per_step if stage.kind == "online" else stage.prompts
        ).items():
            if count > trained[name]:
                raise PromptError(
                    f"stages.{index} needs {count} different prompts of {name} per step and"
                    f" {trained[name]} are left for training; lower its weight in prompts.mixture,"
                    " or add prompts"
                )


def _check_prompts_for_guardrails(recipe: Recipe, table: pa.Table) -> None:
    """Of each set that a guardrail scores alone; the split is random."""
    held_out = Counter(table.filter(pc.equal(table["split"], "held_out"))["source"].to_pylist())
    for config in recipe.guardrails:
        if (
            config.prompts
            and (count := sum(held_out[name] for name in config.prompts)) < MIN_COMPARED
        ):
            raise PromptError(
                f"the guardrail {config.column} scores {', '.join(config.prompts)}, of which"
                f" {count} prompts are held out, and the gate compares {MIN_COMPARED}; raise"
                " prompts.held_out, or add prompts"
            )


def select_branch_prompts(recipe: Recipe, table: pa.Table, branch: str) -> pa.Table:
    """The prompts of a branch: those of its sets, without the held-out ones, which only the run's
    own gate may see.

    Every second of its validation prompts is held out of the branch: its gate compares on them.

    Raises:
        PromptError: the branch has too few validation prompts.
    """
    sets = recipe.select_branch(branch).prompts.prompt_set_labels
    own = table.filter(pc.is_in(table["source"], pa.array(sets, pa.string()))) if sets else table
    rows = [row for row in own.to_pylist() if row["split"] != "held_out"]
    judged = sorted(
        (row for row in rows if row["split"] == "validation"), key=lambda row: row["prompt_id"]
    )
    if len(judged) < MIN_JUDGED:
        raise PromptError(
            f"branches.{branch} has {len(judged)} validation prompts, and its choice and its gate"
            f" need {MIN_JUDGED}; raise prompts.validation"
        )
    for row in judged[::2]:
        row["split"] = "held_out"
    return pa.Table.from_pylist(rows, schema=table.schema)


def _check_targets_of_rewards(recipe: Recipe, rows: list[PromptRow], source: Path) -> None:
    """Check that prompts which a reward reads have a target text."""
    reading = [reward for reward in recipe.rewards if reward.reads]
    if read := [row for row in rows if any(reward.applies_to(row.source) for reward in reading)]:
        check_targets(read, source)


def _check_rows(recipe: Recipe, rows: list[PromptRow], source: Path | None) -> None:
    """Check that the model can draw the prompts of a file."""
    # The run trains a model without a path, on strings of the letters in model.training.
    if source and recipe.model.path is None:
        check_letters(rows, recipe.model.training, source)
    _check_images(rows, recipe.model.family, source)
    _warn_about_negative_prompts(recipe.model, rows, source)


def _check_images(rows: list[PromptRow], family: str, source: Path | None) -> None:
    given = sum(row.image is not None for row in rows)
    known = find_family(family)
    if known and known.edits_images and given < len(rows):
        raise PromptError(
            f"{source or 'prompts.source is left out'}: {len(rows) - given} of {len(rows)} prompts"
            f" have no image, and {family} edits images; add a column 'image' with an image in"
            " every row"
        )
    if given and known and not known.edits_images:
        warnings.warn(
            f"{source}: {given} of {len(rows)} prompts have an image, which {family} ignores;"
            " remove the column, or use a family that edits images",
            stacklevel=3,
        )


def _warn_about_negative_prompts(
    model: ModelConfig, rows: list[PromptRow], source: Path | None
) -> None:
    """Without classifier-free guidance a negative prompt has no effect."""
    given = sum(bool(row.negative_prompt) for row in rows)
    family = find_family(model.family)
    if given and (model.guidance == 1 or (family and not family.guided)):
        warnings.warn(
            f"{source}: {given} of {len(rows)} prompts have a negative prompt, which {model.family}"
            f" ignores with guidance = {model.guidance:g}; remove the column, or set model.guidance"
            " above 1 for a family with guidance",
            stacklevel=3,
        )


def _check_number_of_prompts(recipe: Recipe, trained: int) -> None:
    for index, stage in enumerate(recipe.stages):
        if stage.kind == "custom" or (stage.kind == "offline" and stage.pairs):
            continue  # takes as many as it wants, or has its own
        needed = stage.prompts_per_step if stage.kind == "online" else stage.prompts
        if needed > trained:
            raise PromptError(
                f"stages.{index} needs {needed} different prompts per step and {trained} are left"
                " for training; lower that, prompts.validation or prompts.held_out, or add prompts"
            )


def check_letters(rows: list[PromptRow], training: GlyphTrainingConfig, source: Path) -> None:
    """Check that the glyph model can draw every prompt: at most ``letters`` of its alphabets,
    quoted or not.

    Raises:
        PromptError: it cannot; with the count and the first such prompts.
    """
    known = "".join(training.alphabet_characters)
    drawable = re.compile(rf"\W*[{known + known.lower()}]{{1,{training.letters}}}\W*")
    wrong = [row.prompt for row in rows if not drawable.fullmatch(row.prompt)]
    if wrong:
        ranges = [f"{alphabet[0]}-{alphabet[-1]}" for alphabet in training.alphabet_characters]
        raise PromptError(
            f"{source}: {len(wrong)} of {len(rows)} prompts are not 1 to {training.letters} letters"
            f" {', '.join(ranges)}, as the glyph model needs, first:"
            f" {'; '.join(map(repr, wrong[:3]))}. Shorten them, raise model.training.letters and"
            " width, or add to model.training.alphabets"
        )
