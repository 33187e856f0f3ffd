"""What a recipe asks for and its keys do not show: how often each prompt comes back, and which
passes differ in size. ``ebbflow check`` prints it; nothing here is an error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from ebbflow.recipe import Recipe
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
    for stage in recipe.stages:
        for name, count in _count_prompts_of_stage(recipe, stage).items():
            uses[name] += recipe.rounds * count
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
    elif stage.kind == "offline" and not stage.pairs:
        steps = 1
        num_prompts = stage.prompts
    else:
        # Pairs bring their own prompts, and a custom stage takes as many as it wants.
        return {}
    prompts = recipe.select_branch(stage.branch).prompts
    counts = prompts.count_by_prompt_set(num_prompts) if prompts.mixture else {"": num_prompts}
    return {name: steps * count for name, count in counts.items()}


def describe_passes(recipe: Recipe) -> list[str]:
    """Return a line for each stage whose ``micro_batch`` makes passes of other sizes than itself.

    In an online stage the first ratio is then off 1, as kernels add in another order for another
    batch size (``ebbflow.online.first_update_alarm``).

    Example:
        >>> describe_passes(recipe)
        ["stages.0.micro_batch = 48: rollouts of a step in passes of unequal size (2 of 48, 1 of 32
        samples); it does not divide the 64 samples of an update; 32 divides every batch of the
        stage"]
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
        passes = _list_rollout_passes(stage.prompts_per_step, stage.group_size, size)
        if len(set(passes)) > 1:
            counts = [f"{count} of {number}" for number, count in Counter(passes).items()]
            yield f"rollouts of a step in passes of unequal size ({', '.join(counts)} samples)"
    # One that is smaller than micro_batch is a single pass, of whatever size.
    for what, count in _iterate_training_batches(stage):
        if count > size and count % size:
            yield f"it does not divide the {count} samples of {what}"


def _list_rollout_passes(num_prompts: int, group_size: int, micro_batch: int) -> list[int]:
    """Return the samples of each pass of a step's rollouts."""
    # As ``ebbflow.online.rollout_queue`` splits a step: whole groups to a request, and a group
    # above micro_batch in several passes.
    prompts_at_once = max(1, micro_batch // group_size)
    passes = []
    for start in range(0, num_prompts, prompts_at_once):
        left = min(prompts_at_once, num_prompts - start) * group_size
        while left > 0:
            passes.append(min(left, micro_batch))
            left -= micro_batch
    return passes


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
