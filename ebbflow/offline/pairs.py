"""A file of preference pairs as the tables that an offline stage trains on: rollouts that somebody
else made and judged.

Every pair is a group of its own: its row in the file is the prompt_id, sample 0 is the chosen side
with advantage +1 and sample 1 the rejected one with advantage -1.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Set
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from tqdm import tqdm

from ebbflow.data.images import encode_pngs
from ebbflow.data.pairs import LATENTS, Pair, PairError, read_pair_prompts, read_pairs
from ebbflow.data.prompts import read_prompts
from ebbflow.data.schema import ADVANTAGES, PROMPTS, build_rollout_schema
from ebbflow.data.twins import normalize_text
from ebbflow.models import Model
from ebbflow.models.base import default_device
from ebbflow.offline.shards import build_layout_metadata, build_rollout_batch, build_shard_identity
from ebbflow.progress import show_progress
from ebbflow.stage import StageContext
from ebbflow.storage.tables import count_rows, open_table_writer, read_column, write_table
from ebbflow.timing import Clock
from ebbflow.training.policy_io import open_model

NOT_OURS = -1
"""The policy version of samples that no version of this policy generated."""
PROMPTS_AT_ONCE = 1024
TIES = "with the same chosen and rejected side"
EVALUATED = "on prompts that the run is evaluated on"


@dataclass(frozen=True)
class ImportedPairs:
    """The tables of a stage, and what became of the file's rows.

    Example: a file of 1,000 pairs::

        str(imported)  # "pairs.parquet: pairs to train on: 988; left out: ties 8, on prompts of
                       # the evaluation 4; ignored columns: annotator"
    """

    prompts: Path
    rollouts: list[Path]
    advantages: Path
    source: str
    pairs: int
    ties: int
    """Pairs left out because both sides are the same."""
    evaluated: int
    """Pairs left out because the run is evaluated on their prompts."""
    ignored: list[str]
    """Columns that were not read."""

    def __str__(self) -> str:
        ignored = f"; ignored columns: {', '.join(self.ignored)}" if self.ignored else ""
        left_out = f"left out: ties {self.ties}, on prompts of the evaluation {self.evaluated}"
        return f"{self.source}: pairs to train on: {self.pairs}; {left_out}{ignored}"


def import_pairs(
    ctx: StageContext, model: Model, source: Path, folder: Path, evaluated: Set[str] = frozenset()
) -> ImportedPairs:
    """Write the prompts, rollout shards and advantages of a pairs file into ``folder``, reading its
    images once.

    Pairs that say nothing, and those on ``evaluated`` prompts in whatever spelling
    (``twins.normalize_text``), which no training may see, are left out, counted and warned of.

    Pair i goes into shard i modulo their number, so that a file in some order is not trained on in
    that order. Images are encoded by the model; of latents the images are decoded. Memory is
    bounded by a micro-batch for every shard.

    Raises:
        PairError: the file or a row cannot be used or does not fit the model, or nothing is left.
    """
    clock = Clock()
    ignored = set[str]()
    left_out = Counter[str]()
    prompts = folder / "prompts.parquet"
    advantages = folder / "advantages.parquet"
    about = {**build_shard_identity(ctx), "source": source.name}
    write_table(prompts, PROMPTS, _iterate_prompt_batches(source, ignored), about)
    rows = count_rows(prompts)
    shards = min(ctx.offline_config.shards, rows)
    rollouts = [folder / f"rollouts-{shard}.parquet" for shard in range(shards)]
    with (
        clock.measure_phase("import"),
        show_progress(f"{ctx.stage_label} pairs", "pair", total=rows) as progress,
    ):
        usable = _iterate_usable_pairs(read_pairs(source), evaluated, left_out, progress)
        # Nothing was rolled out; the time that importing took stands once, with the advantages.
        layout = build_layout_metadata(model.latent_shape, ctx.offline_config.latent_precision)
        _write_rollouts(
            ctx, model, usable, rollouts, about | layout | {"seconds": {"rollout": 0.0}}
        )
    pairs = sum(count_rows(path) for path in rollouts) // 2  # two rows each
    _check_left_out(source, pairs, left_out)
    write_table(
        advantages,
        ADVANTAGES,
        map(_build_advantage_batch, rollouts),
        about | {"seconds": clock.seconds},
    )
    return ImportedPairs(
        prompts,
        rollouts,
        advantages,
        source.name,
        pairs,
        left_out[TIES],
        left_out[EVALUATED],
        sorted(ignored),
    )


def import_pairs_from_folder(
    ctx: StageContext, base: Path, prompts: Path, source: Path, folder: Path
) -> ImportedPairs:
    """Call ``import_pairs`` with the base model of a folder and the run's prompt table."""
    evaluated = {prompt.prompt for prompt in read_prompts(prompts) if prompt.split != "train"}
    return import_pairs(ctx, open_model(ctx.recipe, base), source, folder, evaluated)


def _iterate_prompt_batches(source: Path, ignored: set[str]) -> Iterator[pa.RecordBatch]:
    rest = {
        "negative_prompt": "",
        "target": None,
        "source": source.name,
        "split": "train",
        "metadata": "{}",
        "image": None,
    }
    # A pass over the texts alone; images are read once, later. The number of a pair is its
    # prompt_id.
    numbered = read_pair_prompts(source, ignored)
    while rows := list(islice(numbered, PROMPTS_AT_ONCE)):
        yield pa.RecordBatch.from_pylist(
            [{"prompt_id": number, "prompt": text, **rest} for number, text in rows], PROMPTS
        )


def _iterate_usable_pairs(
    pairs: Iterator[Pair], evaluated: Set[str], left_out: Counter[str], progress: tqdm[Any]
) -> Iterator[Pair]:
    normalized = set(map(normalize_text, evaluated))
    for pair in pairs:
        progress.update()
        if normalize_text(pair.prompt) in normalized:
            left_out[EVALUATED] += 1
        elif pair.is_tie:
            left_out[TIES] += 1
        else:
            yield pair


def _write_rollouts(
    ctx: StageContext, model: Model, pairs: Iterator[Pair], paths: list[Path], about: dict[str, Any]
) -> None:
    """Write all shards in one pass; none appears before the last pair is written."""
    # The shape of the model's images (H, W, 3) is what it decodes a latent to.
    picture = model.decode_latents(
        torch.zeros(1, *model.latent_shape, device=default_device())
    ).shape[1:]
    schema = build_rollout_schema(model.latent_shape, ctx.offline_config.latent_precision)
    with ExitStack() as tables:
        writers = [
            tables.enter_context(open_table_writer(path, schema, about | {"shard": i}))
            for i, path in enumerate(paths)
        ]
        # A micro-batch counts samples, and a pair has two.
        for shard, batch in _deal_pairs(pairs, len(paths), max(1, ctx.config.micro_batch // 2)):
            for pair in batch:
                _check_sizes(pair, model.latent_shape, picture)
            writers[shard](_build_pair_batch(ctx, model, batch))


def _deal_pairs(pairs: Iterator[Pair], shards: int, size: int) -> Iterator[tuple[int, list[Pair]]]:
    """Deal pairs out to the shards in turn; yield a shard and the next ``size`` pairs for it."""
    waiting: list[list[Pair]] = [[] for _ in range(shards)]
    for pair in pairs:
        shard = pair.number % shards
        waiting[shard].append(pair)
        if len(waiting[shard]) == size:
            yield shard, waiting[shard]
            waiting[shard] = []
    yield from ((shard, rest) for shard, rest in enumerate(waiting) if rest)


def _build_pair_batch(ctx: StageContext, model: Model, pairs: list[Pair]) -> pa.RecordBatch:
    latents, images = _encode_pairs(model, pairs)
    # Rows: chosen and rejected of the first pair, then those of the second, ...
    prompt_ids = np.repeat([pair.number for pair in pairs], 2).tolist()
    samples = np.tile([0, 1], len(pairs)).tolist()
    return build_rollout_batch(
        prompt_ids,
        samples,
        NOT_OURS,
        latents,
        encode_pngs(images),
        ctx.offline_config.latent_precision,
    )


def _encode_pairs(model: Model, pairs: list[Pair]) -> tuple[Tensor, np.ndarray]:
    """Return (latents, images) of both sides of every pair, chosen first; all pairs of a file are
    of one kind.
    """
    sides = np.stack([side for pair in pairs for side in (pair.chosen, pair.rejected)])
    if pairs[0].columns == LATENTS:
        latents = torch.from_numpy(sides).reshape(-1, *model.latent_shape).to(default_device())
        return latents, model.decode_latents(latents)
    return model.encode_images(sides), sides


def _check_sizes(pair: Pair, latent: tuple[int, ...], picture: tuple[int, ...]) -> None:
    for column, side in zip(pair.columns, (pair.chosen, pair.rejected), strict=True):
        if pair.columns == LATENTS and side.size != np.prod(latent):
            raise PairError(
                f"{pair.location}: {column} has {side.size} numbers, and a latent of this model"
                f" {np.prod(latent)}, shape {latent}; give its latents, or images"
            )
        if pair.columns != LATENTS and side.shape != picture:
            raise PairError(
                f"{pair.location}: {column} is {side.shape[1]} pixels wide and {side.shape[0]}"
                f" high, and this model draws images of {picture[1]} by {picture[0]}; resize it"
            )


def _check_left_out(source: Path, pairs: int, left_out: Counter[str]) -> None:
    listed = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    if not pairs:
        raise PairError(f"{source}: no pair is left to learn from: {listed}")
    if left_out:
        warnings.warn(
            f"{source}: of {pairs + left_out.total()} pairs left out: {listed}", stacklevel=3
        )


def _build_advantage_batch(rollouts: Path) -> pa.RecordBatch:
    prompt_ids, samples = (
        read_column(rollouts, name).to_numpy() for name in ("prompt_id", "sample")
    )
    # Sample 0 is the chosen side, sample 1 the rejected one.
    advantage = np.where(samples == 0, np.float32(1), np.float32(-1))
    return pa.record_batch(
        [pa.array(prompt_ids), pa.array(samples), pa.array(advantage)], schema=ADVANTAGES
    )
