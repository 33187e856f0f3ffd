"""The inputs of an offline stage's training, in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from ebbflow.data.prompts import Prompt, read_prompts, write_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.models import load_model
from ebbflow.offline.advantages import write_advantages
from ebbflow.offline.rollouts import generate_shard
from ebbflow.offline.scoring import score_shard
from ebbflow.recipe import Recipe
from ebbflow.rewards.combine import Scorer
from ebbflow.stage import StageContext
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import write_base_policy


def write_offline_stage(
    folder: Path, recipe: Recipe, base: Path, prompts: Sequence[Prompt], scorer: Scorer
) -> None:
    """Write prompts, the starting policy, two shards of rollouts and the advantages for the
    recipe's second stage.
    """
    ctx = StageContext(recipe, 0, 1)
    table = folder / "prompts.parquet"
    start = folder / "start"
    write_prompts(pa.Table.from_pylist([vars(p) for p in prompts], PROMPTS), table)
    write_base_policy(start, verify_folder(base), recipe.digest, recipe.policy)
    model = load_model(base, recipe.model)
    untouched = Policy(model, recipe.policy, 0)
    trained_on = read_prompts(table, "train")
    scores = []
    untouched.ensure_copy("old")
    for shard in range(2):
        generate_shard(
            ctx, model, untouched, 0, trained_on, shard, folder / f"rollouts-{shard}.parquet"
        )
        scores.append(folder / f"scores-{shard}.parquet")
        score_shard(ctx, scorer, trained_on, folder / f"rollouts-{shard}.parquet", scores[-1])
    write_advantages(ctx, scores, folder / "advantages.parquet")
