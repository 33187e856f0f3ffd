"""What a recipe asks for and its keys do not show: how often each prompt comes back, which passes
differ in size, what the gate can prove. ``ebbflow check`` prints it; nothing here is an error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from ebbflow.compute import count_gpus
from ebbflow.data.prepare import select_branch_prompts
from ebbflow.evaluation.look import (
    count_effective_samples,
    find_needed_prompts,
    find_smallest_gain,
)
from ebbflow.recipe import Recipe
from ebbflow.recipe.families import find_family
from ebbflow.recipe.guardrails import MIN_PROMPTS
from ebbflow.recipe.passes import split_into_equal_passes
from ebbflow.recipe.stages import AnyStageConfig


def describe_prompts(recipe: Recipe, table: pa.Table) -> list[str]:
    """Return how many prompts a run trains on and how often it samples each, one line for each set
    of ``prompts.mixture``.

    Example:
        >>> describe_prompts(recipe, table)
        ["224 prompts to train on, each sampled about 64 times in the run"]
    """
    training = table.filter(pc.equal(table["split"], "train"))
    # Without a mixture all prompts are one set, here without a name.
    if recipe.prompts.mixture:
        num_prompts = Counter(training["source"].to_pylist())
    else:
        num_prompts = Counter({"": training.num_rows})
    uses: Counter[str] = Counter()
    for index, stage in enumerate(recipe.stages):
        for name, count in _count_prompts_of_stage(recipe, stage).items():
            uses[name] += recipe.count_rounds(index) * count
    lines = []
    for name, count in num_prompts.items():
        label = f" of {name}" if name else ""
        times = uses[name] / count
        about = f"{times:,.0f}" if times >= 10 else f"{times:.2g}"
        lines.append(
            f"{count:,} prompts{label} to train on, each sampled about {about} times in the run"
        )
    return lines


def _count_prompts_of_stage(recipe: Recipe, stage: AnyStageConfig) -> dict[str, int]:
    """Return how many prompts a stage takes of each set in a round, those that come back included.

    Filters, curricula and refills change which prompts come back; their mean stays about the same.
    """
    if stage.kind == "online":
        steps = stage.steps
        num_prompts = stage.prompts_per_step
    elif stage.kind == "offline" and stage.takes_prompts:
        steps = 1
        num_prompts = stage.prompts
    else:
        return {}
    prompts = recipe.select_branch(stage.branch).prompts
    counts = prompts.count_by_prompt_set(num_prompts) if prompts.mixture else {"": num_prompts}
    return {name: steps * count for name, count in counts.items()}


def describe_shares(recipe: Recipe, processes: int) -> list[str]:
    """Return a line for each colocated stage whose steps leave some of its processes idle while
    others generate.

    Example:
        >>> describe_shares(recipe, 8)
        ["stages.0: a step has 6 requests of 2 prompts for 8 processes, so 2 of them wait while the
        others generate; raise prompts_per_step or lower micro_batch"]
    """
    lines = []
    for index, stage in enumerate(recipe.stages):
        if stage.kind != "online" or stage.placement != "colocated":
            continue
        prompts = max(1, stage.micro_batch // stage.group_size)
        requests = math.ceil(stage.prompts_per_step / prompts)
        num_idle = -requests % processes
        if num_idle:
            lines.append(
                f"stages.{index}: a step has {requests} requests of {prompts} prompts for"
                f" {processes} processes, so {num_idle} of them wait while the others generate;"
                " raise prompts_per_step or lower micro_batch"
            )
    return lines


def describe_passes(recipe: Recipe) -> list[str]:
    """Return a line for each stage whose passes have other sizes than ``micro_batch``.

    Where they are not even equal, the first ratio of an online stage is off 1, as kernels add in
    another order for another batch size (``ebbflow.online.first_update_alarm``).

    Example:
        >>> describe_passes(recipe)
        ["stages.0.micro_batch = 9: passes have 8 samples, as groups of 24 are split evenly; 8
        divides every batch of the stage"]
    """
    lines = []
    for index, stage in enumerate(recipe.stages):
        remarks = list(_iterate_uneven_batches(stage))
        if remarks:
            lines.append(
                f"stages.{index}.micro_batch = {stage.micro_batch}: {'; '.join(remarks)};"
                f" {_find_divisor(stage)} divides every batch of the stage"
            )
    return lines


def _iterate_uneven_batches(stage: AnyStageConfig) -> Iterator[str]:
    """Yield in words which batches of a stage are not split into passes of one size."""
    size = stage.micro_batch
    if stage.kind == "online":
        size = stage.pass_size
        if size != stage.micro_batch:
            are_split = "split evenly" if size < stage.group_size else "not split"
            yield f"passes have {size} samples, as groups of {stage.group_size} are {are_split}"
        passes = _list_rollout_passes(stage.prompts_per_step, stage.group_size, stage.micro_batch)
        if len(set(passes)) > 1:
            counts = [f"{count} of {number}" for number, count in Counter(passes).items()]
            yield f"rollouts of a step in passes of unequal size ({', '.join(counts)} samples)"
    # One that is smaller than a pass is a single one, of whatever size.
    for what, count in _iterate_training_batches(stage):
        if count > size and count % size:
            yield f"{size} does not divide the {count} samples of {what}"


def _list_rollout_passes(num_prompts: int, group_size: int, micro_batch: int) -> list[int]:
    """Return the samples of each pass of a step's rollouts."""
    # As ``ebbflow.online.rollout_queue`` splits a step: whole groups to a request, and a group
    # above micro_batch in several passes.
    prompts_at_once = max(1, micro_batch // group_size)
    sizes = []
    for start in range(0, num_prompts, prompts_at_once):
        samples = min(prompts_at_once, num_prompts - start) * group_size
        passes = split_into_equal_passes(samples, micro_batch)
        sizes += [part.stop - part.start for part in passes]
    return sizes


def _iterate_training_batches(stage: AnyStageConfig) -> Iterator[tuple[str, int]]:
    """Yield the name of what an optimiser step trains on, and its samples before any selection."""
    if stage.kind == "online":
        samples = stage.prompts_per_step * stage.group_size
        if not samples % stage.updates_per_step:
            yield "an update", samples // stage.updates_per_step
    elif stage.kind == "offline":
        yield "an optimiser step", stage.batch_size


def _find_divisor(stage: AnyStageConfig) -> int:
    """Return the largest micro-batch, up to that of the recipe, that splits every batch evenly."""
    counts = [count for _, count in _iterate_training_batches(stage)]
    if stage.kind == "online":
        counts.append(stage.prompts_per_step * stage.group_size)
    for size in range(stage.micro_batch, 1, -1):
        # Whole groups to a pass, or several passes to a group.
        fits_group = size % stage.group_size == 0 or stage.group_size % size == 0
        if fits_group and not math.gcd(*counts) % size:
            return size
    return 1


def describe_run(recipe: Recipe, prepared: tuple[pa.Table, str] | None) -> list[str]:
    """Write what a reader of the recipe may want to know, a line each.

    Args:
        prepared: the prompt table and a sentence about it; None where it is behind a URI.
    """
    notes = describe_passes(recipe)
    if prepared:
        table, report = prepared
        notes = [report, *describe_prompts(recipe, table), *notes]
        notes += _describe_unused_guardrails(recipe, table)
        notes += _describe_gate(recipe, table)
    family = find_family(recipe.model.family)
    if family and family.caveat:
        notes.append(f"model.family = {recipe.model.family}: {family.caveat}")
    if not recipe.guardrails:
        notes.append(
            "no guardrails are named: the gate compares only the reward and the statistics of the"
            " images; name some under 'guardrails' to see whether the reward is gamed"
        )
    return notes


def describe_gpus(recipe: Recipe) -> list[str]:
    """Say which online stages ask for more GPUs than this machine has, and which leave some of them
    idle; the run may be on another machine.
    """
    num_gpus = count_gpus()
    notes = []
    for index, stage in enumerate(recipe.stages):
        if stage.kind != "online":
            continue
        asked = sum(workers.count * workers.gpus for _, workers in stage.resources)
        if asked > num_gpus:
            notes.append(
                f"stages.{index}.resources ask for {asked:g} GPUs, and this machine has"
                f" {num_gpus}: here the stage would not start"
            )
        # What a group of equal processes cannot have (OnlineStageConfig).
        needs_one_process = stage.engine != "diffusers" or stage.reuse_rollout_forward
        if num_gpus > 1 and stage.placement == "in_process" and not needs_one_process:
            notes.append(
                f"stages.{index} runs on one of the {num_gpus} GPUs of this machine; with"
                " placement: colocated all of them generate and train"
            )
    return notes


def _describe_gate(recipe: Recipe, table: pa.Table) -> list[str]:
    """Say which gains the gate and the gates of branches can show on their prompts."""
    share = recipe.promotion.error_budget / recipe.promotion.looks_per_year
    splits = table["split"].to_pylist()
    num_held_out = splits.count("held_out")
    subject = f"the gate decides on {num_held_out} held-out prompts"
    lines = [_describe_power(recipe, subject, num_held_out, share)]
    for branch in recipe.branches:
        branch_table = select_branch_prompts(recipe, table, branch)
        count = branch_table["split"].to_pylist().count("held_out")
        error = (1 - recipe.evaluation.confidence) / 2
        subject = f"the gate of branch {branch} on {count} prompts"
        lines.append(_describe_power(recipe, subject, count, error))
    return lines


def _describe_unused_guardrails(recipe: Recipe, table: pa.Table) -> list[str]:
    """Say which default guardrails find nothing to read in the held-out prompts."""
    held_out = table.filter(pc.equal(table["split"], "held_out"))
    num_texts = held_out.num_rows - held_out["target"].null_count
    measured = recipe.select_scorable_guardrails(num_texts)
    unused = [config.column for config in recipe.guardrails if config not in measured]
    if not unused:
        return []
    return [
        f"guardrails are left out by default where they cannot be scored: {', '.join(unused)}, as"
        f" {num_texts} of {held_out.num_rows} held-out prompts name a text to read"
    ]


def _describe_power(recipe: Recipe, subject: str, prompts: int, error: float) -> str:
    """Describe the smallest gain that a number of prompts and their samples show at an error."""
    if prompts < MIN_PROMPTS:
        return (
            f"{subject}, which are too few: it promotes nothing below {MIN_PROMPTS}; raise"
            " prompts.held_out"
        )
    samples = recipe.evaluation.samples
    repeated = recipe.count_repeated(prompts)
    effective = count_effective_samples(prompts, repeated, samples)
    smallest = find_smallest_gain(prompts, error, effective)
    needed = find_needed_prompts(smallest / 2, error, effective)
    times = f"{samples} samples each" if repeated == prompts else f"{samples} of {repeated} of them"
    if samples == 1 or not repeated:
        times = "one sample each"
    return (
        f"{subject} with {times}: in four of five cases it proves a gain of {smallest:.2g} standard"
        f" deviations of the prompts' rewards (p below {error:.2g}), if samples of a prompt differ"
        f" as much as prompts do; half of that needs about {needed} prompts"
    )
