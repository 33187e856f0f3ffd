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
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ebbflow.data.images import split_condition_images
from ebbflow.data.prompt_files import read_prompt_file
from ebbflow.data.prompts import (
    Prompt,
    PromptError,
    PromptRow,
    check_targets,
    format_count,
    make_glyph_prompts,
    split_prompts,
    split_with_held_out,
)
from ebbflow.data.twins import find_near_duplicates, hash_input
from ebbflow.recipe import Recipe
from ebbflow.recipe.base import shorten_value
from ebbflow.recipe.families import Family, find_family
from ebbflow.recipe.guardrails import MIN_PROMPTS
from ebbflow.recipe.model import GlyphTrainingConfig, ModelConfig
from ebbflow.recipe.rewards import CustomRewardConfig, RewardConfig


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
    rows, report, source = _read_rows(recipe, files)
    _check_rows(recipe, rows, source)
    # The split of a file never depends on the run: a challenger must not train on prompts that
    # judged its champion. Random strings are a run's own.
    seed = None if source else recipe.seed
    if held_out:
        judged_rows, judged_report = _read_single_file(held_out)
        _check_targets_of_rewards(recipe, judged_rows, held_out)
        _check_rows(recipe, judged_rows, held_out)
        table, num_shared = split_with_held_out(
            rows, judged_rows, config.validation, config.held_out, seed
        )
        report += f"; {judged_report}"
        if num_shared:
            report += f"; {format_count(num_shared, 'prompt')} in both, not trained on"
    else:
        table = split_prompts(rows, config.validation, config.held_out, seed)
        if table.num_rows < len(rows):
            report += (
                f"; {format_count(len(rows) - table.num_rows, 'prompt')} left out, whose text"
                " another split has"
            )
    num_trained = table.num_rows - config.validation - config.held_out

    # What the stages, the guardrails and the branches need of the table, so that a run does not
    # fail hours later.
    _check_number_of_prompts(recipe, num_trained)
    _check_size_of_each_set(recipe, table)
    _check_prompts_for_gate(recipe, table)
    for branch in recipe.branches:
        branch_table = select_branch_prompts(recipe, table, branch)
        try:
            _check_prompts_for_gate(recipe.select_branch(branch), branch_table)
        except PromptError as error:
            raise PromptError(f"branches.{branch}: {error}") from None
    report += (
        f"; {num_trained} to train, {config.validation} to validate, {config.held_out} held out"
    )
    # Random strings are distinct, and too short to be near duplicates.
    if source or held_out:
        report += _describe_near_duplicates(table)
    return table, report


def _describe_near_duplicates(table: pa.Table) -> str:
    """Say how many held-out prompts resemble a training prompt, which makes their scores too good.

    They are not removed: prompts from a template, such as signs, all resemble each other.
    """
    prompts = [Prompt(**row) for row in table.to_pylist()]
    judged = [prompt for prompt in prompts if prompt.split == "held_out"]
    trained = [prompt for prompt in prompts if prompt.split == "train"]
    duplicates = find_near_duplicates(judged, trained)
    if not duplicates:
        return ""
    judged_index = min(duplicates)
    return (
        f"; {len(duplicates)} of {format_count(len(judged), 'held-out prompt')} nearly equal a"
        f" training prompt, first {shorten_value(judged[judged_index].prompt)} and"
        f" {shorten_value(trained[duplicates[judged_index]].prompt)}"
    )


def _read_rows(recipe: Recipe, files: Sequence[Path]) -> tuple[list[PromptRow], str, Path | None]:
    """The prompts to train on and a sentence about them, and what messages call their source, None
    where they are random strings.
    """
    if not files:
        training = recipe.model.training
        rows = make_glyph_prompts(
            recipe.prompts.count, training.letters, recipe.seed, training.alphabet_characters
        )
        return rows, f"{len(rows)} random strings", None
    if recipe.prompts.mixture:
        rows, report = _read_mixture(recipe, files)
        source = files[0].parent
    else:
        rows, report = _read_single_file(files[0])
        source = files[0]
    # A branch may have rewards that read, and no prompts but those of some sets.
    for view in (recipe, *map(recipe.select_branch, recipe.branches)):
        labels = view.prompts.prompt_set_labels
        view_rows = [row for row in rows if row.source in labels or not view.prompts.mixture]
        _check_targets_of_rewards(view, view_rows, source)
    return rows, report, source


def _read_single_file(path: Path) -> tuple[list[PromptRow], str]:
    rows, report = read_prompt_file(path)
    return rows, str(report)


def _read_mixture(recipe: Recipe, files: Sequence[Path]) -> tuple[list[PromptRow], str]:
    """The prompts of all files; of those that several have, the first: one of them could be trained
    on and the other held out.
    """
    distinct_rows: dict[tuple[str, str, str | None, bytes | None], PromptRow] = {}
    reports = []
    num_repeated = 0
    for part, file in zip(recipe.prompts.mixture, files, strict=True):
        rows, report = _read_single_file(file)
        reports.append(report)
        for row in rows:
            key = (row.prompt, row.negative_prompt, row.target, row.image)
            num_repeated += key in distinct_rows
            # The file's name is its source when it is alone; a mixture has a label for each part.
            distinct_rows.setdefault(key, replace(row, source=part.prompt_set_label))
    if num_repeated:
        reports.append(f"{num_repeated} in several files, taken from the first")
    return list(distinct_rows.values()), "; ".join(reports)


def _check_size_of_each_set(recipe: Recipe, table: pa.Table) -> None:
    num_trained = Counter(table.filter(pc.equal(table["split"], "train"))["source"].to_pylist())
    for index, stage in enumerate(recipe.stages):
        if stage.kind == "custom" or not stage.takes_prompts:
            continue
        prompts_per_step = stage.prompts_per_step if stage.kind == "online" else stage.prompts
        branch_prompts = recipe.select_branch(stage.branch).prompts
        for name, count in branch_prompts.count_by_prompt_set(prompts_per_step).items():
            if count > num_trained[name]:
                raise PromptError(
                    f"stages.{index} needs {count} different prompts of {name} per step and"
                    f" {num_trained[name]} are left for training; lower its weight in"
                    " prompts.mixture, or add prompts"
                )


def _check_prompts_for_gate(recipe: Recipe, table: pa.Table) -> None:
    """Check that the gate can compare policies on the held-out prompts: otherwise the run could be
    paid for, and never be promoted.
    """
    rows = table.filter(pc.equal(table["split"], "held_out")).to_pylist()
    # By id, as evaluations read them: which prompts have several samples depends on the order.
    prompts = sorted((Prompt(**row) for row in rows), key=lambda prompt: prompt.prompt_id)
    # The gate asks for a reward of every held-out sample. Rewards that compare the images of a
    # prompt take no part in evaluations; a custom one is known only once it is imported.
    for reward in recipe.rewards:
        if not isinstance(reward, CustomRewardConfig) and reward.compares:
            continue
        scored = [prompt for prompt in prompts if reward.applies_to(prompt.source)]
        reasons = list(filter(None, map(reward.explain_unscorable, scored)))
        if reasons:
            raise PromptError(
                f"the reward {reward.column} can score {len(scored) - len(reasons)} of"
                f" {format_count(len(scored), 'held-out prompt')}, and the gate promotes no policy"
                f" without a reward for each; the first that it cannot score: {reasons[0]}"
            )
    # Default guardrails are left out where they have nothing to read.
    if not recipe.has_default_guardrails:
        for guardrail in recipe.guardrails:
            _check_prompts_for_guardrail(recipe, guardrail, prompts)


def _check_prompts_for_guardrail(
    recipe: Recipe, guardrail: RewardConfig, prompts: Sequence[Prompt]
) -> None:
    # Whether the guardrail can run is not asked here: the run may be on another machine than the
    # check. The gate ignores one that can run on neither side.
    # The gate counts failures by sample: the first held-out prompts of the table may have several,
    # and the others one.
    num_repeated = recipe.count_repeated(len(prompts))
    num_samples = {
        prompt.prompt_id: recipe.evaluation.samples if index < num_repeated else 1
        for index, prompt in enumerate(prompts)
    }
    scored = [prompt for prompt in prompts if guardrail.applies_to(prompt.source)]
    # Of a guardrail of some sets alone there may be few: the split is random.
    if len(scored) < recipe.min_compared:
        raise PromptError(
            f"the guardrail {guardrail.column} scores {', '.join(guardrail.prompts)}, of which"
            f" {len(scored)} prompts are held out, and the gate compares {recipe.min_compared};"
            " raise prompts.held_out, or add prompts"
        )
    reasons: dict[int, str] = {}  # by the id of the prompt
    for prompt in scored:
        reason = guardrail.explain_unscorable(prompt)
        if reason:
            reasons[prompt.prompt_id] = reason
    num_scorable = len(scored) - len(reasons)
    num_failures = sum(num_samples[prompt_id] for prompt_id in reasons)
    num_asked = sum(num_samples[prompt.prompt_id] for prompt in scored)
    # A prompt without a text is excused by the gate; without rules or an image, it is a failure.
    too_many_failures = not guardrail.reads and num_failures > recipe.max_failed_share * num_asked
    if num_scorable < recipe.min_compared or too_many_failures:
        limit = (
            f"allows max_failed_share = {recipe.max_failed_share:g} of the samples to fail, here"
            f" {num_failures} of {num_asked}"
            if too_many_failures
            else f"compares {recipe.min_compared}"
        )
        first_reason = next(iter(reasons.values()))
        raise PromptError(
            f"guardrails: {guardrail.column} can score {num_scorable} of"
            f" {format_count(len(scored), 'held-out prompt')}, and the gate {limit}, so that no"
            f" policy of this run could be promoted where {guardrail.column} can run; take it out"
            f" of 'guardrails', or change the prompts. The first that it cannot score:"
            f" {first_reason}"
        )


def select_branch_prompts(recipe: Recipe, table: pa.Table, branch: str) -> pa.Table:
    """The prompts of a branch: those of its sets, without the held-out ones, which only the run's
    own gate may see.

    Every second of its validation prompts is held out of the branch: its gate compares on them.

    Raises:
        PromptError: the branch has too few validation prompts, so that its gate would refuse
            whatever it learns.
    """
    sets = recipe.select_branch(branch).prompts.prompt_set_labels
    # Without a mixture there are no sets, and every branch has all prompts.
    if sets:
        table = table.filter(pc.is_in(table["source"], pa.array(sets, pa.string())))
    rows = [row for row in table.to_pylist() if row["split"] != "held_out"]
    # By id, since the rows of a table may come in any order and the choice must not depend on it.
    judged_rows = sorted(
        (row for row in rows if row["split"] == "validation"), key=lambda row: row["prompt_id"]
    )
    # Every second one, with its twins: those before it and after it choose among the branch's
    # policies.
    groups: dict[bytes, list[dict[str, Any]]] = {}
    for row in judged_rows:
        groups.setdefault(hash_input(Prompt(**row)), []).append(row)
    for twins in list(groups.values())[::2]:
        for row in twins:
            row["split"] = "held_out"
    num_held_out = sum(row["split"] == "held_out" for row in judged_rows)
    if num_held_out < MIN_PROMPTS:
        raise PromptError(
            f"branches.{branch} has {len(judged_rows)} validation prompts, of which its gate"
            f" compares {num_held_out} and needs {MIN_PROMPTS}; raise prompts.validation, so that"
            f" about {2 * MIN_PROMPTS} are of this branch"
        )
    return pa.Table.from_pylist(rows, schema=table.schema)


def _check_targets_of_rewards(recipe: Recipe, rows: list[PromptRow], source: Path) -> None:
    """Check that prompts which a reward reads have a target text."""
    reading_rewards = [reward for reward in recipe.rewards if reward.reads]
    rows_to_read = [
        row for row in rows if any(reward.applies_to(row.source) for reward in reading_rewards)
    ]
    if rows_to_read:
        check_targets(rows_to_read, source)


def _check_rows(recipe: Recipe, rows: list[PromptRow], source: Path | None) -> None:
    """Check that the model can draw the prompts of a file."""
    # The run trains a model without a path, on strings of the letters in model.training.
    if source and recipe.model.path is None:
        check_letters(rows, recipe.model.training, source)
    _check_images(rows, recipe.model.family, source)
    _warn_about_negative_prompts(recipe.model, rows, source)


def _check_images(rows: list[PromptRow], family: str, source: Path | None) -> None:
    num_images = sum(row.image is not None for row in rows)
    # Of a user's family without a record nothing is known: its adapter has to check.
    record = find_family(family)
    if record and record.edits_images and num_images < len(rows):
        raise PromptError(
            f"{source or 'prompts.source is left out'}: {len(rows) - num_images} of {len(rows)}"
            f" prompts have no image, and {family} edits images; add a column 'image' with an image"
            " in every row"
        )
    if num_images and record and not record.edits_images:
        warnings.warn(
            f"{source}: {num_images} of {len(rows)} prompts have an image, which {family} ignores;"
            " remove the column, or use a family that edits images",
            stacklevel=3,
        )
    if record and record.edits_images:
        _check_image_counts(rows, family, record)


def _check_image_counts(rows: list[PromptRow], family: str, record: Family) -> None:
    """Check that every prompt has as many images as its family takes, and all as many: rows of one
    batch have the same shapes.
    """
    first = None
    for row in rows:
        count = len(split_condition_images(row.image or b""))
        if not record.takes_images(count):
            raise PromptError(
                f"{row.location}: image has {format_count(count, 'image')}, and {family} takes"
                f" {record.describe_images()}; "
                + (
                    "write a list of as many"
                    if count < record.min_images
                    else "leave the others out, or take a family for several (docs/models.md)"
                )
            )
        first = first or (row.location, count)
        if count != first[1]:
            raise PromptError(
                f"{row.location}: image has {format_count(count, 'image')}, and {first[0]} has"
                f" {first[1]}; give each prompt of a run as many"
            )


def _warn_about_negative_prompts(
    model: ModelConfig, rows: list[PromptRow], source: Path | None
) -> None:
    """Without classifier-free guidance a negative prompt has no effect."""
    num_negatives = sum(bool(row.negative_prompt) for row in rows)
    family = find_family(model.family)
    if num_negatives and (model.guidance == 1 or (family and not family.guided)):
        warnings.warn(
            f"{source}: {num_negatives} of {len(rows)} prompts have a negative prompt, which"
            f" {model.family} ignores with guidance = {model.guidance:g}; remove the column, or set"
            " model.guidance above 1 for a family with guidance",
            stacklevel=3,
        )


def _check_number_of_prompts(recipe: Recipe, trained: int) -> None:
    for index, stage in enumerate(recipe.stages):
        if stage.kind == "custom" or not stage.takes_prompts:
            continue
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
    letters = "".join(training.alphabet_characters)
    # The tokenizer drops quotes and blanks, and reads small letters as capitals.
    drawable = re.compile(rf"\W*[{letters + letters.lower()}]{{1,{training.letters}}}\W*")
    wrong = [row.prompt for row in rows if not drawable.fullmatch(row.prompt)]
    if wrong:
        ranges = [f"{alphabet[0]}-{alphabet[-1]}" for alphabet in training.alphabet_characters]
        raise PromptError(
            f"{source}: {len(wrong)} of {len(rows)} prompts are not 1 to {training.letters} letters"
            f" {', '.join(ranges)}, as the glyph model needs, first:"
            f" {'; '.join(map(repr, wrong[:3]))}. Shorten them, raise model.training.letters and"
            " width, or add to model.training.alphabets"
        )
