"""The training of an offline stage: advantages once, then epochs over the stored rollouts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from tqdm import tqdm

from ebbflow.algorithms.advantages import compute_advantages
from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.schema import ADVANTAGES
from ebbflow.data.tables import about_table, read_column, read_table, row_count, write_table
from ebbflow.flow.noise import Stream, generator
from ebbflow.models import Conditioning, Model
from ebbflow.offline.shards import read_latents
from ebbflow.records import StageRecord
from ebbflow.rollouts.generate import SampleKeys
from ebbflow.stage import Log, Place, open_model, open_policy, save_policy
from ebbflow.timing import Clock
from ebbflow.training.batches import forward_batch
from ebbflow.training.distributed import Ranks
from ebbflow.training.policy import Policy
from ebbflow.training.update import make_optimizer, optimise

Encode = Callable[[Sequence[int]], Conditioning]


def write_advantages(place: Place, scores: list[Path], path: Path) -> dict[str, float]:
    """Advantages of every sample worth training on, over all shards; returns their statistics.

    Samples without a score and groups without variance are left out and counted in the statistics.
    """
    table = pa.concat_tables([read_table(shard).select(["prompt_id", "sample", "reward"]) for shard in scores])
    rewards = table["reward"].to_numpy()
    prompt_ids = table["prompt_id"].to_numpy()
    result = compute_advantages(rewards, prompt_ids, place.config.advantages)
    columns = [prompt_ids, table["sample"].to_numpy(), result.values]
    batch = pa.record_batch([pa.array(column[result.keep]) for column in columns], schema=ADVANTAGES)
    about = {"stage": place.label, "metrics": result.metrics, "seconds": _seconds(scores, "scoring")}
    write_table(path, ADVANTAGES, [batch], about)
    return result.metrics


@dataclass(frozen=True)
class Shard:
    """The rows of a rollout shard that are worth training on: row numbers, keys and advantages."""

    path: Path
    rows: np.ndarray
    prompt_ids: np.ndarray
    samples: np.ndarray
    advantage: np.ndarray


@dataclass(frozen=True)
class Part:
    """One process's part of a batch: a row per sample.

    Attributes:
        epoch: how often these samples were trained on before.
        batch_size: samples of the whole batch, over all processes.
        clean: final latents, fp32 [N, ...].
        advantage: [N].
    """

    epoch: int
    batch_size: int
    keys: SampleKeys
    clean: Tensor
    advantage: Tensor


def train_epochs(
    place: Place, model: Model, policy: Policy, prompts: list[Prompt], rollouts: list[Path], advantages: Path, log: Log
) -> StageRecord:
    """Train ``policy`` in place on stored rollouts; every process of an FSDP group calls it with the same arguments.

    The old policy is the one that generated the rollouts; it stays as it is.

    Args:
        prompts: the training split.
        log: called with the metrics of every optimiser step and its number, from zero.
    """
    config, ranks, clock = place.offline, Ranks.current(), Clock()
    optimizer = make_optimizer(policy, config.optimizer)
    shards = _large_enough([_trainable_rows(path, read_table(advantages, ADVANTAGES)) for path in rollouts], ranks)
    encode = _encoder(model, prompts, shards)
    updates = config.epochs * sum(len(_batches(shard.rows, config.batch_size, ranks.world)) for shard in shards)
    name, quiet = f"{place.label} {config.algorithm.name}", None if ranks.rank == 0 else True
    schedule = tqdm(_schedule(place, shards, ranks), name, updates, unit="step", disable=quiet)
    for step, part in enumerate(schedule):
        before = clock.seconds["training"]
        with clock.phase("training"):
            metrics = _optimise(place, policy, optimizer, encode, part, ranks)
        seconds = clock.seconds["training"] - before
        speed = {"seconds/training": seconds, "ms_per_image/training": 1000 * seconds / part.batch_size}
        log(metrics | speed | {"epoch": part.epoch}, step)
        schedule.set_postfix(loss=f"{metrics['loss']:.4f}")
    return StageRecord(
        label=place.label,
        algorithm=config.algorithm.name,
        samples=sum(row_count(path) for path in rollouts),
        optimizer_steps=updates,
        seconds={**_seconds(rollouts, "rollout"), **about_table(advantages)["seconds"], **clock.seconds},
    )


def train_offline_folder(
    place: Place, base: Path, folder: Path, prompts: Path, rollouts: list[Path], advantages: Path, trained: Path, log: Log
) -> StageRecord:
    """``train_epochs`` from a policy folder to a new one; shards the model over the process group where there is one."""
    ranks = Ranks.current()
    model = open_model(place.recipe, base)
    policy, card = open_policy(place, model, folder, shard=ranks.world > 1)
    record = train_epochs(place, model, policy, read_prompts(prompts, "train"), rollouts, advantages, log)
    if place.algorithm.old_decay:
        policy.snapshot("old")  # the next stage generates with what this one learnt
    save_policy(place, policy, card, record, trained, write=ranks.rank == 0)
    return record


def _optimise(
    place: Place, policy: Policy, optimizer: torch.optim.Optimizer, encode: Encode, part: Part, ranks: Ranks
) -> dict[str, float]:
    """One optimiser step of all processes, this one on its part of the batch."""
    config, algorithm = place.offline, place.algorithm
    conditioning = encode(part.keys.prompt_ids)
    device = conditioning.embeds.device
    draws = algorithm.draws(config.algorithm)
    terms = forward_batch(part.clean.to(device), conditioning, part.advantage.to(device), part.keys, draws, visit=part.epoch)
    passes = _passes(part.batch_size, ranks.world, draws, config.micro_batch)
    return optimise(
        policy, optimizer, algorithm, config.algorithm, terms, config.optimizer, passes, total_terms=part.batch_size * draws
    )


def _passes(samples: int, world: int, draws: int, micro_batch: int) -> int:
    """Passes of at most ``micro_batch`` terms that every process can take part in: their shares may differ by one sample."""
    largest, smallest = math.ceil(samples / world) * draws, samples // world * draws
    return min(math.ceil(largest / micro_batch), smallest)


def _trainable_rows(path: Path, advantages: pa.Table) -> Shard:
    keys = pa.table({name: read_column(path, name) for name in ("prompt_id", "sample")})
    keys = keys.append_column("row", pa.array(np.arange(len(keys))))
    found = keys.join(advantages, ["prompt_id", "sample"], join_type="inner").sort_by("row")
    return Shard(path, *(found[name].to_numpy() for name in ("row", "prompt_id", "sample", "advantage")))


def _large_enough(shards: list[Shard], ranks: Ranks) -> list[Shard]:
    """The shards from which every process gets a sample; the others are named in a warning."""
    small = [shard for shard in shards if len(shard.rows) < ranks.world]
    if small and ranks.rank == 0:
        listed = ", ".join(f"{shard.path.name} ({len(shard.rows)})" for shard in small)
        warnings.warn(f"left out, fewer samples to train on than processes ({ranks.world}): {listed}", stacklevel=3)
    return [shard for shard in shards if len(shard.rows) >= ranks.world]


def _encoder(model: Model, prompts: list[Prompt], shards: list[Shard]) -> Encode:
    """Encodes every prompt of the stage once; returns the conditioning of given prompt ids."""
    wanted = np.unique([prompt_id for shard in shards for prompt_id in shard.prompt_ids.tolist()])
    by_id = {prompt.prompt_id: prompt.prompt for prompt in prompts}
    table = model.encode([by_id[prompt_id] for prompt_id in wanted.tolist()]) if len(wanted) else None

    def encode(prompt_ids: Sequence[int]) -> Conditioning:
        assert table is not None
        return table.rows(torch.from_numpy(np.searchsorted(wanted, prompt_ids)))

    return encode


def _schedule(place: Place, shards: list[Shard], ranks: Ranks) -> Iterator[Part]:
    """This process's part of the batch of every optimiser step.

    An epoch goes through the shards in a seeded order and shuffles inside each, so one shard is in memory at a time.
    """
    for epoch in range(place.offline.epochs):
        for index in _order(place.seed, epoch, 0, len(shards)):
            shard = shards[index]
            latents = read_latents(shard.path)
            order = _order(place.seed, epoch, 1 + index, len(shard.rows))
            for batch in _batches(order, place.offline.batch_size, ranks.world):
                mine = np.array_split(batch, ranks.world)[ranks.rank]
                keys = SampleKeys(place.seed, shard.prompt_ids[mine].tolist(), shard.samples[mine].tolist())
                yield Part(epoch, len(batch), keys, latents[shard.rows[mine]], torch.from_numpy(shard.advantage[mine]))


def _batches(rows: np.ndarray, batch_size: int, world: int) -> list[np.ndarray]:
    """The rows in equal batches of about ``batch_size``, each with a sample for every process: no small last one."""
    return np.array_split(rows, min(math.ceil(len(rows) / batch_size), len(rows) // world))


def _order(seed: int, epoch: int, place: int, count: int) -> np.ndarray:
    return generator(seed, prompt_id=0, sample=epoch, step=place, stream=Stream.ORDER).permutation(count)


def _seconds(tables: list[Path], phase: str) -> dict[str, float]:
    return {phase: sum(about_table(path)["seconds"][phase] for path in tables)}
