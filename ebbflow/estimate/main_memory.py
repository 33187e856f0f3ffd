"""What a process keeps in main memory, and what it takes on the GPU while it encodes its prompts.

=============  ====================================================================================
parts          text encoders in ``model.precision`` and the VAE in float32 of every process that
               loads the model: on the GPU while they are called, and here otherwise. Eight ranks
               of a machine have eight of them
samples        of each sample of the process its latents, those of its trajectory and their means,
               and its picture in 8 bits. Training joins what each request brought, so there are
               two of each; where ranks exchange samples, they are copied once more into the tensors
               of the whole step. With ``one_step_off`` and ``async`` as many steps wait besides
weights        4 A in a process that sends its A trained parameters to rollout workers, or receives
               them
=============  ====================================================================================

Encoded prompts are in files. The parameters, copies and optimiser states that ``model.cpu_offload``
moves are ``Memory.offloaded``; they are pinned where they are, not copied into pinned buffers.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace

from ebbflow.data.model_sizes import BYTES
from ebbflow.data.prompt_windows import PROMPTS_PER_WINDOW
from ebbflow.estimate.memory import Memory, ProcessMemory
from ebbflow.estimate.work import count_recorded_latents
from ebbflow.recipe import Recipe
from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.stage import StageContext


def count_part_bytes(process: ProcessMemory) -> int:
    """Return the bytes of the text encoders and the VAE."""
    precision = process.recipe.model.precision
    return BYTES[precision] * process.sizes.text_encoders + 4 * process.sizes.vae


def count_sample_bytes(process: ProcessMemory, ctx: StageContext) -> int:
    """Return the bytes of one sample after its rollout, without its picture."""
    num_latents = 1
    if ctx.config.algorithm_kind.records_trajectory:
        num_latents += count_recorded_latents(ctx)
    return process.latent_bytes * num_latents


def count_step_bytes(
    process: ProcessMemory, ctx: StageContext, processes: int, share: float = 1.0
) -> int:
    """Return the bytes of the samples of an online stage in a process that trains on them.

    Args:
        processes: that exchange samples; 1 where all samples of a step come to the process.
        share: of the samples of a step that the process generates.
    """
    config = ctx.online_config
    prompts = math.ceil(config.prompts_per_step * (1 + config.refill_rounds) * share)
    samples = prompts * config.group_size
    # Joined from the parts of the requests; then in the tensors of the whole step.
    copies = 2 if processes == 1 else 3
    steps_ahead = {"sync": 0, "one_step_off": 1, "async": config.staleness}[config.mode]
    sample = count_sample_bytes(process, ctx)
    pictures = 3 * process.sample.pixels
    return samples * ((copies + steps_ahead) * sample + (1 + steps_ahead) * pictures)


def encodes_between_steps(ctx: StageContext) -> bool:
    """Return whether a stage has too many prompts to encode all of them before its first step."""
    config = ctx.config
    if config.anchor:
        return True  # how many captions it has, its data says
    if isinstance(config, OnlineStageConfig):
        if config.validation and config.validation.prompts > PROMPTS_PER_WINDOW:
            return True
        if config.prompts_depend_on_rewards and _count_choices(ctx) <= PROMPTS_PER_WINDOW:
            return False
        if config.curriculum:
            return True  # of the prompts that it chooses too late for a window
    return _count_prompts(ctx) > PROMPTS_PER_WINDOW


def count_encoded_prompts(ctx: StageContext) -> int:
    """Return how many encoded prompts a stage has at a time, at most, those of its validations and
    of its anchor included.
    """
    config = ctx.config
    count = _count_training_prompts(ctx)
    if config.anchor:
        count += PROMPTS_PER_WINDOW  # of captions, one window
    if isinstance(config, OnlineStageConfig) and config.validation:
        # One window: the one before is forgotten when all its samples are scored.
        at_once = max(PROMPTS_PER_WINDOW, config.micro_batch)
        count += min(config.validation.prompts, at_once)
    return count


def _count_training_prompts(ctx: StageContext) -> int:
    """Return how many encoded prompts a stage has for its steps, at most: those of two windows, as
    its rollouts may be in the next one already.
    """
    config = ctx.config
    count = _count_prompts(ctx)
    if not isinstance(config, OnlineStageConfig):
        at_once = math.ceil(count / ctx.offline_config.shards)
        return min(count, 2 * max(PROMPTS_PER_WINDOW, at_once))
    at_once = config.prompts_per_step * config.candidates_per_prompt
    late = 0
    if config.prompts_depend_on_rewards:
        choices = _count_choices(ctx)
        # One window has all of them, whatever the rewards choose.
        if choices <= PROMPTS_PER_WINDOW:
            return choices
        # The first pass of a filter encodes everything. Otherwise the files may have as few
        # prompts as one window.
        if not config.prompt_filter:
            choices = min(choices, max(count, PROMPTS_PER_WINDOW))
        count = choices
        # Two groups that are too late for their window: one, and the one in front of it.
        late = 2 * config.prompts_per_step if config.curriculum else 0
    return min(count, 2 * max(PROMPTS_PER_WINDOW, at_once)) + late


def _count_choices(ctx: StageContext) -> int:
    """Return from how many training prompts an online stage chooses, at most."""
    prompts = ctx.branch_recipe.prompts
    # How many prompts a file has, nobody knows before it is read.
    count = sys.maxsize if prompts.source_files else prompts.count
    prompt_filter = ctx.online_config.prompt_filter
    if prompt_filter and prompt_filter.prompts:
        return min(count, prompt_filter.prompts)
    return count


def count_evaluated_prompts(recipe: Recipe) -> int:
    """Return how many encoded prompts an evaluation has at a time, at most."""
    count = recipe.prompts.validation + recipe.prompts.held_out
    return min(count, 2 * max(PROMPTS_PER_WINDOW, recipe.evaluation.micro_batch))


def _count_prompts(ctx: StageContext) -> int:
    """Return how many prompts a stage encodes ahead in a round, at most."""
    config = ctx.config
    if isinstance(config, OnlineStageConfig):
        return config.steps * config.prompts_per_step * config.candidates_per_prompt
    return ctx.offline_config.prompts


def add_encoding(
    process: ProcessMemory, memory: Memory, shards: int, between_steps: bool = False
) -> Memory:
    """Add the bytes that a process takes on the GPU while it encodes prompts.

    Weights that are whole wait in main memory meanwhile where they do not fit beside the encoders
    (``ebbflow.models.residency``); shards stay.

    Args:
        between_steps: as ``encodes_between_steps`` says: the optimiser's state is there as well.
    """
    encoding = process.encoding_memory()
    encoders = encoding.others + encoding.activations + encoding.samples
    # Before its first step a process has no moments yet: optimisers allocate them in that step.
    state = memory.copies + memory.loading + (memory.optimizer if between_steps else 0)
    resident = encoders + state if shards > 1 else max(encoders, state)
    return replace(memory, encoding=resident)
