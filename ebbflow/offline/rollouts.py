"""The rollouts of an offline stage: generated once, a Parquet file for each shard."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from ebbflow.data.images import encode_pngs
from ebbflow.data.prompts import Prompt, read_prompt_ids, read_prompt_sources, read_prompts
from ebbflow.data.sampling import sample_mixed_prompts, sample_prompts
from ebbflow.data.schema import build_rollout_schema
from ebbflow.flow.noise import SampleKeys
from ebbflow.models import Model
from ebbflow.models.base import Conditioning, device_of, generate_in_size
from ebbflow.models.encoding import build_prompt_lookup
from ebbflow.offline.shards import (
    build_layout_metadata,
    build_rollout_batch,
    build_shard_identity,
    choose_image_size,
)
from ebbflow.progress import show_progress
from ebbflow.rollouts.engine import Diffusers, Engine, open_engine
from ebbflow.rollouts.parity import compute_parity_bar, measure_parity, plan_parity_samples
from ebbflow.stage import StageContext
from ebbflow.storage.tables import write_table
from ebbflow.timing import Clock
from ebbflow.training.policy import Policy
from ebbflow.training.policy_io import load_policy

logger = logging.getLogger(__name__)
P = TypeVar("P")


def generate_shard(
    ctx: StageContext,
    model: Model,
    policy: Policy,
    version: int,
    prompts: list[Prompt],
    shard: int,
    path: Path,
    engine: Engine | None = None,
) -> None:
    """Generate every group of one shard of an offline stage and write it to ``path``.

    Args:
        policy: rolls out with the copy that the algorithm generates with, if any.
        version: the policy's version, stored with every sample.
        prompts: the training split; the stage's prompts are chosen from it, and shard i of n gets
            every n-th.
        engine: with the policy's weights; left out, diffusers in this process.

    Raises:
        ParityError: another engine generates other samples than the policy would.
    """
    chosen = choose_shard_prompts(ctx, prompts, shard, [prompt.source for prompt in prompts])
    write_shard(ctx, model, policy, version, chosen, shard, path, engine)


def generate_shard_from_folders(
    ctx: StageContext, base: Path, folder: Path, prompts: Path, shard: int, path: Path
) -> None:
    """Call ``generate_shard`` with the policy of a folder. Of the prompt table only the shard's own
    rows become prompts.
    """
    policy, metadata = load_policy(ctx, base, folder)
    # The ids alone are read first: a shard of many reads the texts and images of its own prompts.
    ids = choose_shard_prompts(
        ctx, read_prompt_ids(prompts, "train"), shard, read_prompt_sources(prompts, "train")
    )
    by_id = {prompt.prompt_id: prompt for prompt in read_prompts(prompts, "train", ids)}
    with closing(_open_stage_engine(ctx, base, policy)) as engine:
        write_shard(
            ctx,
            policy.model,
            policy,
            metadata.version,
            [by_id[i] for i in ids],
            shard,
            path,
            engine,
        )


def choose_shard_prompts(
    ctx: StageContext, prompts: Sequence[P], shard: int, sources: Sequence[str] = ()
) -> list[P]:
    """Choose the prompts, or ids of prompts, of the training split that a shard generates.

    Args:
        sources: of each prompt, for ``prompts.mixture``.
    """
    # Every shard chooses all prompts of the stage, the same ones, and takes its own: no task before
    # it has to hand them out. The samples are those of step 0.
    count = ctx.offline_config.prompts
    counts = ctx.branch_recipe.prompts.count_by_prompt_set(count)
    if counts:
        chosen = sample_mixed_prompts(prompts, sources, counts, step=0, seed=ctx.stage_seed)
    else:
        chosen = sample_prompts(prompts, count, step=0, seed=ctx.stage_seed)
    return chosen[shard :: ctx.offline_config.shards]


def write_shard(
    ctx: StageContext,
    model: Model,
    policy: Policy,
    version: int,
    prompts: list[Prompt],
    shard: int,
    path: Path,
    engine: Engine | None = None,
) -> None:
    """Write a shard (``generate_shard``), given the shard's own prompts."""
    config = ctx.offline_config
    clock = Clock()
    precision = config.latent_precision
    # Whole groups: a group's samples are generated together and follow one another in the shard.
    groups_at_once = max(1, config.micro_batch // config.group_size)
    engine = engine or Diffusers(ctx, policy, ctx.algorithm.generates)
    with generate_in_size(model, choose_image_size(ctx, shard)):
        # The clock is filled while the batches are generated: the metadata of a table is read after
        # its last batch.
        about = _build_shard_metadata(ctx, shard, clock) | build_layout_metadata(
            model.latent_shape, precision
        )
        batches = _generate_batches(
            ctx, model, policy, engine, version, prompts, groups_at_once, clock
        )
        write_table(path, build_rollout_schema(model.latent_shape, precision), batches, about)


def _open_stage_engine(ctx: StageContext, base: Path, policy: Policy) -> Engine:
    """Open the engine of the stage, with the weights that generate."""
    generates = ctx.algorithm.generates
    if ctx.config.engine == "diffusers":
        return Diffusers(ctx, policy, generates)
    engine = open_engine(ctx, base)
    # In the order of the parameters, as a copy that was read from a file has another.
    weights = policy.parameters if generates == "current" else policy.copies[generates]
    engine.load({name: weights[name].detach().cpu() for name in policy.parameters})
    return engine


def _check_engine(
    ctx: StageContext, policy: Policy, engine: Engine, conditioning: Conditioning, keys: SampleKeys
) -> None:
    """Check another engine before it generates the shard: the policy replays its first samples.

    Raises:
        ParityError: the engine generates other samples than the policy would.
    """
    config = ctx.config
    device = device_of(policy.model)
    first = slice(0, config.parity.samples)
    conditioning = conditioning.select_rows(first).to(device)
    keys = keys.select_slice(first)
    sampler, plan = plan_parity_samples(config.sampler)
    trajectory = engine.generate(conditioning, keys, sampler, plan)[0].move_to(device).trajectory
    assert trajectory is not None, "the plan records every step"
    bar = compute_parity_bar(config, trajectory.latents[0, 0].numel())
    with policy.use_copy(ctx.algorithm.generates):
        metrics = measure_parity(
            policy, trajectory, conditioning, keys, sampler, bar, config.micro_batch
        )
    logger.info(
        "%s: engine %s differs by %.1e in log-prob",
        ctx.stage_label,
        config.engine,
        metrics["parity/log_prob_max"],
    )


def _generate_batches(
    ctx: StageContext,
    model: Model,
    policy: Policy,
    engine: Engine,
    version: int,
    prompts: list[Prompt],
    groups_at_once: int,
    clock: Clock,
) -> Iterator[pa.RecordBatch]:
    config = ctx.config
    with clock.measure_phase("rollout"):
        encode = build_prompt_lookup(model, prompts)
    progress = show_progress(
        f"{ctx.stage_label} rollout", "image", total=len(prompts) * config.group_size
    )
    for start in range(0, len(prompts), groups_at_once):
        with clock.measure_phase("rollout"):
            repeated, keys = ctx.build_sample_groups(
                prompts[start : start + groups_at_once], step=0
            )
            conditioning = encode(repeated)
            if start == 0 and config.engine != "diffusers":
                _check_engine(ctx, policy, engine, conditioning, keys)
            rollouts, pictures = engine.generate(conditioning, keys, config.sampler)
            latents = rollouts.latents
            images = encode_pngs(pictures)
        # Outside the phase: a generator waits here while its batch is written.
        progress.update(len(images))
        yield build_rollout_batch(
            keys.prompt_ids,
            keys.samples,
            version,
            latents,
            images,
            ctx.offline_config.latent_precision,
        )


def _build_shard_metadata(ctx: StageContext, shard: int, clock: Clock) -> dict[str, Any]:
    return {
        **build_shard_identity(ctx),
        "shard": shard,
        "engine": ctx.config.engine,
        "dtype": ctx.config.rollout_precision or ctx.recipe.model.precision,
        "sampler": ctx.config.sampler.model_dump(),
        "micro_batch": ctx.config.micro_batch,
        "seconds": clock.seconds,
    }
