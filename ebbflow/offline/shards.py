"""Rollout shards: what tells those of a stage from everything else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ebbflow.data.prompts import Prompt
from ebbflow.data.schema import rollout_schema
from ebbflow.stage import StageContext
from ebbflow.storage.tables import TableError, check_columns, read_column, read_schema, read_table_metadata

if TYPE_CHECKING:
    import torch


def shard_identity(ctx: StageContext) -> dict[str, Any]:
    """What tells the shards of a stage from those of every other."""
    return {"recipe_digest": ctx.recipe.digest, "stage": ctx.label, "seed": ctx.seed}


def require_shard(ctx: StageContext, path: Path, prompts: Sequence[Prompt], latent_shape: tuple[int, ...] | None = None) -> None:
    """Check that a file is a rollout shard of this stage, on these prompts; with a shape, that its latents have it.

    Raises:
        TableError: it is not whole, or is something else.
    """
    columns = read_schema(path)
    latent = columns.field("latent").type if "latent" in columns.names else None
    shape = tuple(latent.shape) if isinstance(latent, pa.FixedShapeTensorType) else ()
    check_columns(path, rollout_schema(latent_shape or shape))
    about = read_table_metadata(path)
    differ = [
        f"{key} = {about.get(key)!r} (this stage's: {mine!r})"
        for key, mine in shard_identity(ctx).items()
        if about.get(key) != mine
    ]
    if differ:
        raise TableError(f"{path} is a rollout shard of something else: {', '.join(differ)}; generate it with this recipe")
    known = {prompt.prompt_id for prompt in prompts}
    if strange := set(read_column(path, "prompt_id").to_pylist()) - known:
        raise TableError(f"{path} has samples of prompt_id = {min(strange)}, and the run's prompts have none; generate it again")


def read_latents(path: Path) -> torch.Tensor:
    """The final latents of a rollout shard, fp32 [N, ...], in the order of its rows."""
    import torch  # scoring and advantages do without

    return torch.from_numpy(read_column(path, "latent").combine_chunks().to_numpy_ndarray().copy())


def seconds_of(tables: list[Path], phase: str) -> dict[str, float]:
    """How long a phase took over all shards, by its name."""
    return {phase: sum(read_table_metadata(path)["seconds"][phase] for path in tables)}
