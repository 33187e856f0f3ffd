"""Rollout shards: their rows and metadata, what tells those of a stage from everything else, and
how their latents are read.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ebbflow.data.schema import LATENT_BYTES, ROLLOUT_LAYOUT, build_rollout_schema
from ebbflow.recipe.base import apportion_total
from ebbflow.stage import StageContext
from ebbflow.storage.tables import (
    TableError,
    check_columns,
    count_rows,
    read_column,
    read_row_groups,
    read_table_metadata,
)

if TYPE_CHECKING:
    import torch

SCORES_DIGEST = "scores_digest"
"""The key in the metadata of a table of scores that has the sha256 of its values."""
DATA_DIGEST = "data_digest"
"""The key in the metadata of captioned data's tables that has the sha256 of what was encoded. Such
shards are of no stage: every run with the same data, VAE and sizes has them.
"""


@dataclass(frozen=True)
class LatentLayout:
    """How the latents of a shard are stored: the shape of one, without the batch, and the precision
    of its elements.

    Example: LatentLayout((16, 64, 64), "bfloat16") has rows of 131,072 bytes.
    """

    shape: tuple[int, ...]
    precision: str

    @property
    def row_bytes(self) -> int:
        return LATENT_BYTES[self.precision] * math.prod(self.shape)


def build_shard_identity(ctx: StageContext) -> dict[str, Any]:
    """Build what tells the shards of a stage from those of every other."""
    return {"recipe_digest": ctx.recipe.digest, "stage": ctx.stage_label, "seed": ctx.stage_seed}


def build_layout_metadata(
    latent_shape: Sequence[int], precision: str = "float32"
) -> dict[str, Any]:
    """Build what a shard's metadata says about its columns."""
    return {
        "layout": ROLLOUT_LAYOUT,
        "latent_shape": list(latent_shape),
        "latent_precision": precision,
    }


def build_rollout_batch(
    prompt_ids: Sequence[int],
    samples: Sequence[int],
    version: int,
    latents: torch.Tensor,
    images: list[bytes],
    precision: str,
) -> pa.RecordBatch:
    """Build rows of a shard (``build_rollout_schema``).

    Args:
        latents: [N, ...] on any device; rounded to ``precision``.
        images: PNG, animated for a video.
    """
    import torch  # scoring and advantages do without

    stored = latents.detach().to("cpu", getattr(torch, precision)).contiguous()
    # The bytes of all latents, one after another: Arrow takes them as they are, without a Python
    # object for each. numpy has no bfloat16, so they are viewed as bytes in torch.
    values = np.frombuffer(stored.view(torch.uint8).numpy(), np.uint8)
    schema = build_rollout_schema(latents.shape[1:], precision)
    columns = [
        pa.array(prompt_ids, pa.int64()),
        pa.array(samples, pa.int64()),
        pa.array([version] * len(images), pa.int64()),
        pa.Array.from_buffers(
            schema.field("latent").type, len(images), [None, pa.py_buffer(values)]
        ),
        pa.array(stored.isfinite().flatten(1).all(1).numpy()),
        pa.array(images, pa.binary()),
    ]
    return pa.record_batch(columns, schema=schema)


def check_shard(
    ctx: StageContext,
    path: Path,
    known: Set[int],
    latent_shape: tuple[int, ...] | None = None,
    identity: Mapping[str, Any] | None = None,
) -> None:
    """Check that a file is a rollout shard of this stage, on prompts with ``known`` ids; with a
    shape, that its latents have it.

    Args:
        identity: what its metadata must say; default: ``build_shard_identity``.

    Raises:
        TableError: it is not whole, or is something else.
    """
    about = read_table_metadata(path)
    layout = _parse_layout(path, about)
    check_columns(path, build_rollout_schema(layout.shape, layout.precision))
    if latent_shape and layout.shape != tuple(latent_shape):
        raise TableError(
            f"{path} has latents of shape {layout.shape}, and the model's have {latent_shape};"
            " generate it again"
        )
    require_stage_identity(ctx, path, about, "a rollout shard", identity)
    strange = set(np.unique(read_column(path, "prompt_id").to_numpy()).tolist()) - known
    if strange:
        raise TableError(
            f"{path} has samples of prompt_id = {min(strange)}, and the run's prompts have none;"
            " generate it again"
        )


def read_stage_identity(ctx: StageContext, advantages: Path) -> dict[str, Any]:
    """Read what tells the shards that a table of advantages belongs to from all others."""
    if ctx.offline_config.data is None:
        return build_shard_identity(ctx)
    return {DATA_DIGEST: read_table_metadata(advantages)[DATA_DIGEST]}


def require_stage_identity(
    ctx: StageContext,
    path: Path,
    metadata: Mapping[str, Any],
    kind: str,
    identity: Mapping[str, Any] | None = None,
) -> None:
    """Check that the metadata of a table name this recipe, stage and seed, or what ``identity``
    says.

    Raises:
        TableError: they name others.
    """
    differ = [
        f"{key} = {metadata.get(key)!r} (this stage's: {mine!r})"
        for key, mine in (identity or build_shard_identity(ctx)).items()
        if metadata.get(key) != mine
    ]
    if differ:
        raise TableError(
            f"{path} is {kind} of something else: {', '.join(differ)}; generate it with this recipe"
        )


def choose_image_size(ctx: StageContext, shard: int) -> tuple[int, int] | None:
    """Height and width of the images of a shard; None: those of the model."""
    sizes = ctx.config.sizes
    if not sizes:
        return None
    counts = apportion_total([size.weight for size in sizes], ctx.offline_config.shards)
    size_of_shard = [
        (size.height, size.width)
        for size, count in zip(sizes, counts, strict=True)
        for _ in range(count)
    ]
    return size_of_shard[shard]


def read_image_size(ctx: StageContext, path: Path) -> tuple[int, int] | None:
    """Return height and width of the images of a shard of this stage; None: those of the model."""
    if ctx.offline_config.data is not None:
        size = read_table_metadata(path)["image_size"]  # of its bucket
        return (size[0], size[1]) if size else None
    if not ctx.config.sizes:
        return None
    return choose_image_size(ctx, read_table_metadata(path)["shard"])


def read_layout(path: Path) -> LatentLayout:
    """Read how a shard stores its latents.

    Raises:
        TableError: the file is none, or one of an older or newer version of Ebbflow.
    """
    return _parse_layout(path, read_table_metadata(path))


def _parse_layout(path: Path, about: dict[str, Any]) -> LatentLayout:
    if about.get("layout") != ROLLOUT_LAYOUT:
        raise TableError(
            f"{path} has rollouts of layout {about.get('layout', 1)!r}, and this version of Ebbflow"
            f" reads layout {ROLLOUT_LAYOUT}; generate them again, or take the version that wrote"
            " them"
        )
    return LatentLayout(tuple(about["latent_shape"]), about["latent_precision"])


def read_latents(path: Path) -> torch.Tensor:
    """Read the final latents of a shard, fp32 [N, ...], in the order of its rows."""
    (latents,) = read_latent_parts(path, [np.arange(count_rows(path))])
    return latents.float()


def read_latent_parts(
    path: Path, parts: Sequence[np.ndarray], stopped: Callable[[], bool] = bool
) -> list[torch.Tensor]:
    """Read the latents of some rows of a shard into a tensor for each part, so that each can be
    freed by itself.

    Memory is that of the result, and of a row group.

    Args:
        parts: the numbers of the rows of each tensor.
        stopped: asked after each row group; once true, the rest is not read.

    Returns:
        [n, ...] for each part, in the precision that they are stored in.

    Raises:
        TableError: the shard is damaged, or has no such rows.
    """
    import torch

    layout = read_layout(path)
    lengths = [len(rows) for rows in parts]
    nothing = np.empty(0, np.int64)  # ``concatenate`` wants at least one array
    tensors = [
        _allocate_tensor((length, *layout.shape), getattr(torch, layout.precision))
        for length in lengths
    ]
    # All wanted rows, ascending, with the part and the position in it that each belongs to. So the
    # file is read once, from its beginning to its end.
    rows = np.concatenate([nothing, *parts])
    position = np.concatenate([nothing, *map(np.arange, lengths)])
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    position = position[order]
    part = np.repeat(np.arange(len(parts)), lengths)[order]

    def has_wanted_rows(start: int, end: int) -> bool:
        return bool(np.diff(np.searchsorted(rows, [start, end])))

    copied = 0
    for start, values in read_row_groups(path, "latent", has_wanted_rows):
        if stopped():
            break
        stored = _view_latent_bytes(path, values, layout)
        first, last = np.searchsorted(rows, [start, start + len(values)])
        for number in np.unique(part[first:last]):
            here = first + np.flatnonzero(part[first:last] == number)
            # Copied as bytes, whatever the precision: (n, bytes of a latent).
            target = tensors[number].view(torch.uint8).numpy().reshape(-1, layout.row_bytes)
            target[position[here]] = stored[rows[here] - start]
        copied += last - first
    if copied < len(rows) and not stopped():
        raise TableError(
            f"{path} has {count_rows(path)} rows, and row {rows[-1]} is asked for; generate it"
            " again"
        )
    return tensors


def _allocate_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor in pages of its own."""
    import torch

    # The system has such pages back once they are freed; of what malloc gave to a thread, much
    # stays, and a thread reads the shards. A mapping of 0 bytes is an error.
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(
        shape
    )


def decode_latent(layout: LatentLayout, value: bytes) -> np.ndarray:
    """Decode a stored latent to fp32 [...]."""
    if layout.precision == "float32":
        return np.frombuffer(value, "<f4").reshape(layout.shape)
    # bfloat16 is the upper half of a float32, and numpy does not know it.
    return (np.frombuffer(value, "<u2").astype("<u4") << 16).view("<f4").reshape(layout.shape)


def _view_latent_bytes(path: Path, values: pa.Array, layout: LatentLayout) -> np.ndarray:
    """View latents as uint8 [N, bytes of a latent]."""
    if values.type != pa.binary(layout.row_bytes):
        raise TableError(
            f"{path} has latents of type {values.type}, not of {layout.row_bytes} bytes; generate"
            " it again"
        )
    # Buffer 0 of an Arrow array says which values are null, buffer 1 has the values. A slice of an
    # array shares the buffers of the whole, from its offset on.
    stored = np.frombuffer(
        values.buffers()[1],
        np.uint8,
        len(values) * layout.row_bytes,
        values.offset * layout.row_bytes,
    )
    return stored.reshape(len(values), layout.row_bytes)


def sum_phase_seconds(tables: list[Path], phase: str) -> dict[str, float]:
    """Sum how long a phase took over all shards, by its name."""
    return {phase: sum(read_table_metadata(path)["seconds"][phase] for path in tables)}
