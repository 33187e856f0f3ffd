"""Captioned pictures as the tables that an offline stage trains on: rollouts that nobody generated
and nothing scored.

Every picture is a prompt of its own: its row in the data is the prompt_id, its sample is number 0,
with advantage 0. ``import_data`` reads captions and digests of every run; ``encode_data`` encodes
latents, which all runs share whose pictures, VAE and sizes are the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ebbflow.data.buckets import BucketSize, list_bucket_sizes
from ebbflow.data.captioned import (
    CaptionedPicture,
    DataError,
    count_captioned,
    list_unlisted_files,
    read_captioned,
)
from ebbflow.data.prompts import read_prompts
from ebbflow.data.schema import ADVANTAGES, PROMPTS, build_rollout_schema
from ebbflow.data.sized_pictures import format_sizes, read_in_size
from ebbflow.data.twins import normalize_text
from ebbflow.models import Model
from ebbflow.models.base import default_device, generate_in_size
from ebbflow.offline.shards import DATA_DIGEST, build_layout_metadata, build_rollout_batch
from ebbflow.progress import show_progress
from ebbflow.recipe.data import DataConfig
from ebbflow.recipe.families import FAMILIES
from ebbflow.stage import StageContext
from ebbflow.storage.artifacts import read_manifest
from ebbflow.storage.identity import describe_state
from ebbflow.storage.tables import open_table_writer, write_table
from ebbflow.timing import Clock
from ebbflow.training.policy_io import open_model

NOT_OURS = -1
"""The policy version of pictures that no policy generated."""
ROWS_AT_ONCE = 1024
PICTURES_PER_SHARD = 1024
MAX_SHARDS = 32
"""Shards of a bucket: all of them are open while pictures are encoded."""
NOT_VAE = ("transformer", "text_encoder", "tokenizer", "scheduler", "image_encoder")
"""Parts of a base model that no latent depends on."""


@dataclass(frozen=True)
class ImportedData:
    """The prompts and advantages of a stage, and what became of the data's rows.

    Example::

        str(imported)  # "photos: pictures: 812; left out: on prompts of the evaluation 3; files
                       # without a row 2; digest 9f86d081884c"

    Attributes:
        pictures: rows of the data.
        evaluated: those left out because the run is evaluated on their captions.
        unlisted: pictures in the folder that its metadata file does not name.
        digest: sha256 of all captions and pictures.
        encoding: sha256 of what their latents depend on.
    """

    prompts: Path
    advantages: Path
    source: str
    pictures: int
    evaluated: int
    unlisted: int
    digest: str
    encoding: str

    def __str__(self) -> str:
        return (
            f"{self.source}: pictures: {self.pictures}; left out: on prompts of the evaluation"
            f" {self.evaluated}; files without a row {self.unlisted}; digest {self.digest[:12]}"
        )


def import_data(
    ctx: StageContext, config: DataConfig, source: Path, base: Path, prompts: Path, folder: Path
) -> ImportedData:
    """Write the prompts and the advantages of captioned pictures into ``folder``; every file is
    read for its digest, and no picture is decoded.

    Pictures whose captions the run is evaluated on, in whatever case and punctuation, which no
    training may see, get no advantage, and are counted and warned of.

    Args:
        base: the base-model folder, whose VAE will encode the pictures.
        prompts: the run's prompt table.

    Raises:
        DataError: the data or a row cannot be used, or nothing is left.
    """
    clock = Clock()
    # Normalised, as the run splits its prompts: the same words are the same prompt.
    evaluated = {
        normalize_text(prompt.prompt) for prompt in read_prompts(prompts) if prompt.split != "train"
    }
    # Captions and digests of all rows, some hundred bytes each; the bytes of Parquet's images are
    # freed with their batch.
    captions: list[str] = []
    digests: list[str] = []
    with (
        clock.measure_phase("import"),
        show_progress(f"{ctx.stage_label} data", "picture") as progress,
    ):
        for picture in read_captioned(source):
            captions.append(picture.caption)
            digests.append(picture.digest())
            progress.update()
    digest = _hash_json(list(zip(captions, digests, strict=True)))
    encoding = _hash_json([digests, describe_encoding(ctx, config), _digest_vae(base)])
    about = {"source": source.name, DATA_DIGEST: encoding, "seconds": clock.seconds}
    trained = [
        number
        for number, caption in enumerate(captions)
        if normalize_text(caption) not in evaluated
    ]
    imported = ImportedData(
        prompts=folder / "prompts.parquet",
        advantages=folder / "advantages.parquet",
        source=source.name,
        pictures=len(captions),
        evaluated=len(captions) - len(trained),
        unlisted=len(list_unlisted_files(source)),
        digest=digest,
        encoding=encoding,
    )
    write_table(imported.prompts, PROMPTS, _iterate_prompts(captions, source.name), about)
    write_table(imported.advantages, ADVANTAGES, [_build_advantages(trained)], about)
    _check_left_out(imported)
    return imported


def describe_encoding(ctx: StageContext, config: DataConfig) -> dict[str, Any]:
    """Describe what a recipe says that the latents of a picture depend on."""
    model = ctx.recipe.model
    family: Any = model.family
    if family not in FAMILIES:
        # The code of a user's own family is not Ebbflow's, which is in the key of the cache.
        family = [family, describe_state(family)]
    return {
        "family": family,
        "size": [model.height, model.width, model.frames],
        "buckets": config.buckets.model_dump() if config.buckets else None,
        "frames_per_second": config.frames_per_second,
        "precision": getattr(ctx.config, "latent_precision", "float32"),
        "micro_batch": ctx.config.micro_batch,
    }


def encode_data(
    ctx: StageContext, config: DataConfig, model: Model, source: Path, encoding: str, folder: Path
) -> list[Path]:
    """Encode captioned pictures into rollout shards, some for each bucket; memory is bounded by a
    micro-batch for each bucket.

    Pictures that are smaller than their bucket's size, and videos that are too short, are left
    out, counted and warned of.

    Args:
        encoding: the digest of what is encoded, for the metadata of the shards.

    Raises:
        DataError: a picture cannot be read, or none is left.
    """
    shape = model.decode_latents(
        torch.zeros(1, *model.latent_shape, device=default_device())
    ).shape[1:]
    sizes = list_bucket_sizes(shape[-3:-1], config.buckets)
    left_out = Counter[str]()
    rows = count_captioned(source)
    num_shards = min(MAX_SHARDS, math.ceil(rows / PICTURES_PER_SHARD))
    with ExitStack() as stack:
        writers = _ShardWriters(ctx, stack, folder, encoding, num_shards, sizes, shape)
        work = show_progress(f"{ctx.stage_label} data", "picture", read_captioned(source), rows)
        for size, batch in _batch_by_size(
            work, config, ctx.recipe.model.frames, sizes, ctx.config.micro_batch, left_out
        ):
            writers.write(model, size, batch)
    if left_out:
        listed = ", ".join(f"{number} {reason}" for reason, number in left_out.items())
        warnings.warn(f"{source.name}: of {rows} pictures left out: {listed}", stacklevel=2)
    if not writers.paths:
        raise DataError(
            f"{source}: no picture is left to train on: all {rows} are"
            f" {' or '.join(left_out)} of {format_sizes(sizes)}; add larger ones, or lower"
            " model.height and model.width"
        )
    return writers.paths


def encode_data_from_folder(
    ctx: StageContext, config: DataConfig, base: Path, source: Path, encoding: str, folder: Path
) -> list[Path]:
    """Call ``encode_data`` with the base model of a folder."""
    return encode_data(ctx, config, open_model(ctx.recipe, base), source, encoding, folder)


class _ShardWriters:
    """Writes encoded pictures of each bucket to its shards in turn."""

    def __init__(
        self,
        ctx: StageContext,
        stack: ExitStack,
        folder: Path,
        encoding: str,
        num_shards: int,
        sizes: list[BucketSize],
        shape: tuple[int, ...],
    ) -> None:
        """``shape``: of a picture that the model decodes."""
        self.ctx = ctx
        self.stack = stack
        self.folder = folder
        self.encoding = encoding
        self.num_shards = num_shards
        self.sizes = sizes
        self.usual_size = tuple(shape[-3:-1])
        self.precision = getattr(ctx.config, "latent_precision", "float32")
        self.paths: list[Path] = []
        self.writers: dict[tuple[BucketSize, int], Any] = {}
        self.batches = Counter[BucketSize]()

    def write(self, model: Model, size: BucketSize, batch: list[tuple[int, np.ndarray]]) -> None:
        """Encode and write some pictures of a bucket, by their numbers."""
        # A batch at a time goes to the next shard, so that data in some order is not trained on in
        # that order, and no row group is of a picture or two.
        key = (size, self.batches[size] % self.num_shards)
        self.batches[size] += 1
        # A family of one size, such as glyph, is not asked to change it.
        with generate_in_size(model, None if size == self.usual_size else size):
            latents = model.encode_images(np.stack([picture for _, picture in batch]))
            if key not in self.writers:
                self.writers[key] = self._open_shard(key, model.latent_shape)
        numbers = [number for number, _ in batch]
        # The pictures themselves are in the data, and nothing reads them from here.
        images = [b""] * len(batch)
        self.writers[key](
            build_rollout_batch(
                numbers, [0] * len(batch), NOT_OURS, latents, images, self.precision
            )
        )

    def _open_shard(self, key: tuple[BucketSize, int], latent_shape: tuple[int, ...]) -> Any:
        size, index = key
        name = f"{size[1]}x{size[0]}"
        path = self.folder / f"latents-{name}-{index}.parquet"
        about = {
            DATA_DIGEST: self.encoding,
            "shard": len(self.paths),
            "image_size": None if size == self.usual_size else list(size),
            "seconds": {"rollout": 0.0},
        }
        self.paths.append(path)
        schema = build_rollout_schema(latent_shape, self.precision)
        layout = build_layout_metadata(latent_shape, self.precision)
        return self.stack.enter_context(open_table_writer(path, schema, about | layout))


def _batch_by_size(
    pictures: Iterable[CaptionedPicture],
    config: DataConfig,
    frames: int,
    sizes: list[BucketSize],
    batch_size: int,
    left_out: Counter[str],
) -> Iterator[tuple[BucketSize, list[tuple[int, np.ndarray]]]]:
    """Yield batches of pictures of one size, scaled and cropped to it, with their numbers."""
    waiting: dict[BucketSize, list[tuple[int, np.ndarray]]] = defaultdict(list)
    for picture in pictures:
        pixels = read_in_size(picture, config, frames, sizes)
        if isinstance(pixels, str):
            left_out[pixels] += 1
            continue
        size = pixels.shape[-3:-1]
        waiting[size].append((picture.number, pixels))
        if len(waiting[size]) == batch_size:
            yield size, waiting.pop(size)
    yield from waiting.items()


def _digest_vae(base: Path) -> str:
    """Digest the files of a base model that its latents may depend on."""
    files = read_manifest(base)
    return _hash_json(
        {name: entry for name, entry in files.items() if not name.startswith(NOT_VAE)}
    )


def _hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _iterate_prompts(captions: list[str], source: str) -> Iterator[pa.RecordBatch]:
    rest = {
        "negative_prompt": "",
        "target": None,
        "source": source,
        "split": "train",
        "metadata": "{}",
        "image": None,
    }
    numbered = zip(count(), captions, strict=False)
    while rows := list(islice(numbered, ROWS_AT_ONCE)):
        yield pa.RecordBatch.from_pylist(
            [{"prompt_id": number, "prompt": caption, **rest} for number, caption in rows], PROMPTS
        )


def _build_advantages(numbers: list[int]) -> pa.RecordBatch:
    zeros = np.zeros(len(numbers))
    columns = [
        pa.array(numbers, pa.int64()),
        pa.array(zeros.astype(np.int64)),
        pa.array(zeros.astype(np.float32)),
    ]
    return pa.record_batch(columns, schema=ADVANTAGES)


def _check_left_out(imported: ImportedData) -> None:
    if imported.pictures == imported.evaluated:
        raise DataError(
            f"{imported.source}: the run is evaluated on the captions of all {imported.pictures}"
            " pictures; add pictures with other captions"
        )
    if imported.evaluated or imported.unlisted:
        warnings.warn(str(imported), stacklevel=3)
