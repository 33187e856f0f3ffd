"""The rollouts of an offline stage: generated once, a Parquet file for each shard."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from torch import Tensor

from ebbflow.data.images import encode_pngs
from ebbflow.data.prompt_windows import build_prompt_windows
from ebbflow.data.prompts import Prompt, read_prompt_ids, read_prompt_sources, read_prompts
from ebbflow.data.sampling import sample_mixed_prompts, sample_prompts
from ebbflow.data.schema import build_rollout_schema
from ebbflow.data.sounds import Sounds, attach_sounds
from ebbflow.flow.noise import SampleKeys
from ebbflow.models import Model
from ebbflow.models.base import Conditioning, device_of, generate_in_size
from ebbflow.models.encoding import PromptWindows
from ebbflow.models.sound import decode_sounds
from ebbflow.offline.shards import (
    build_layout_metadata,
    build_rollout_batch,
    build_shard_identity,
    choose_image_size,
)
from ebbflow.progress import show_progress
from ebbflow.recipe.choices import ENGINES_WITH_OWN_NOISE
from ebbflow.rollouts.engine import Engine, build_text_arguments, open_engine
from ebbflow.rollouts.generate import Diffusers
from ebbflow.rollouts.parity import measure_parity, plan_parity_samples
from ebbflow.stage import StageContext
from ebbflow.storage.tables import open_table_writer
from ebbflow.timing import Clock
from ebbflow.training.distributed import Ranks
from ebbflow.training.policy import Policy
from ebbflow.training.policy_io import load_policy
from ebbflow.training.rounds import collect_rounds, deal_in_rounds
from ebbflow.training.shared_prompts import encode_windows_together
from ebbflow.watchdog import watch

logger = logging.getLogger(__name__)
P = TypeVar("P")
A = TypeVar("A")
B = TypeVar("B")


class GeneratedGroups(NamedTuple):
    """Samples that were generated together, of whole groups.

    Attributes:
        latents: final ones, [N, ...], on the CPU.
        pictures: as ``Model.decode_latents`` gives them.
        sounds: of the pictures; None where the family has none.
    """

    keys: SampleKeys
    latents: Tensor
    pictures: np.ndarray
    sounds: Sounds | None


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
    """Generate every group of one shard of an offline stage and write it to ``path``. In a process
    group every rank generates its rounds of micro-batches, and rank 0 writes.

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
        # The clock is filled while groups are generated: the metadata of a table is read after its
        # last batch.
        about = _build_shard_metadata(ctx, shard, clock) | build_layout_metadata(
            model.latent_shape, precision
        )
        groups = _generate_groups(ctx, model, policy, engine, prompts, groups_at_once, clock)
        schema = build_rollout_schema(model.latent_shape, precision)

        def build_rows(part: GeneratedGroups | None) -> pa.RecordBatch | None:
            if part is None:
                return None
            return build_rollout_batch(
                part.keys.prompt_ids,
                part.keys.samples,
                version,
                part.latents,
                attach_sounds(encode_pngs(part.pictures), part.sounds),
                precision,
            )

        # A thread compresses and writes what was generated beside the next forward passes, and has
        # at most one micro-batch of each rank waiting, so that memory stays bounded.
        with ThreadPoolExecutor(1) as thread:
            batches = collect_rounds(_call_in_thread(thread, build_rows, groups, 1))
            ranks = Ranks.current()
            if ranks.rank:
                list(batches)  # empty: rank 0 has the rows
                return
            with open_table_writer(path, schema, about) as write:
                for _ in _call_in_thread(thread, write, batches, ranks.world):
                    pass


def _call_in_thread(
    thread: ThreadPoolExecutor, function: Callable[[A], B], values: Iterable[A], waiting: int
) -> Iterator[B]:
    """Yield the results of a function that a thread calls while the next values are made; at most
    ``waiting`` results wait to be taken.
    """
    results: deque[Future[B]] = deque()
    for value in values:
        results.append(thread.submit(function, value))
        if len(results) > waiting:
            yield results.popleft().result()
    for result in results:
        yield result.result()


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
    ctx: StageContext,
    policy: Policy,
    engine: Engine,
    conditioning: Conditioning,
    keys: SampleKeys,
    prompts: Sequence[Prompt],
) -> None:
    """Check another engine before it generates the shard: the policy replays its first samples.

    Args:
        prompts: of the samples.

    Raises:
        ParityError: the engine generates other samples than the policy would.
    """
    config = ctx.config
    device = device_of(policy.model)
    first = slice(0, config.parity.samples)
    conditioning = conditioning.select_rows(first).to(device)
    keys = keys.select_samples(first)
    sampler, plan = plan_parity_samples(config.sampler)
    texts = build_text_arguments(engine, prompts[first])
    rollouts, _ = engine.generate(conditioning, keys, sampler, plan, **texts)
    trajectory = rollouts.move_to(device).trajectory
    assert trajectory is not None, "the plan records every step"
    metrics = measure_parity(
        policy,
        trajectory,
        conditioning,
        keys,
        sampler,
        config.parity,
        ctx.algorithm.generates,
        config.rollout_precision,
        config.micro_batch,
        config.engine in ENGINES_WITH_OWN_NOISE,
    )
    logger.info(
        "%s: the denoising steps of engine %s differ by %.1e standard deviations",
        ctx.stage_label,
        config.engine,
        metrics["parity/mean_shift"],
    )


def _generate_groups(
    ctx: StageContext,
    model: Model,
    policy: Policy,
    engine: Engine,
    prompts: list[Prompt],
    groups_at_once: int,
    clock: Clock,
) -> Iterator[GeneratedGroups | None]:
    """Generate the groups of this rank's rounds, None in a last round that has none for it."""
    config = ctx.config
    ranks = Ranks.current()
    # Windows of micro-batches, and not of rounds: how many processes share them changes no padding.
    batches = [
        prompts[start : start + groups_at_once] for start in range(0, len(prompts), groups_at_once)
    ]
    embeddings = PromptWindows(build_prompt_windows(batches))
    total = len(prompts) * config.group_size
    progress = show_progress(
        f"{ctx.stage_label} rollout", "image", total=total, quiet=ranks.rank > 0
    )
    for number, index in enumerate(deal_in_rounds(range(len(batches)))):
        with clock.measure_phase("rollout"):
            # All ranks encode what any of them generates in this round.
            steps = range(number * ranks.world, (number + 1) * ranks.world)
            encode_windows_together(model, embeddings, steps)
        if index is None:
            yield None
            continue
        with clock.measure_phase("rollout"):
            part = batches[index]
            keys = SampleKeys.number_groups(
                ctx.stage_seed,
                [prompt.prompt_id for prompt in part],
                config.group_size,
                sharing=config.noise_sharing,
            )
            shown = [prompt for prompt in part for _ in range(config.group_size)]
            conditioning = embeddings(index, shown).to(device_of(model))
            if index == 0 and config.engine != "diffusers":
                _check_engine(ctx, policy, engine, conditioning, keys, shown)
            options = build_text_arguments(engine, shown)
            # The recipe rejects a cache with another engine, whose network is elsewhere.
            if isinstance(engine, Diffusers):
                options["cache"] = config.rollout_cache
                options["quantization"] = config.rollout_quantization
            with watch(f"{ctx.stage_label}: generating {len(keys)} samples"):
                rollouts, pictures = engine.generate(conditioning, keys, config.sampler, **options)
                sounds = rollouts.sounds or decode_sounds(model, rollouts.latents)
            latents = rollouts.latents.to("cpu")
        # Outside the phase: a generator waits here while its caller is busy.
        # The other ranks generate as many meanwhile, but for the last round.
        progress.update(min(len(keys) * ranks.world, total - progress.n))
        yield GeneratedGroups(keys, latents, pictures, sounds)


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
