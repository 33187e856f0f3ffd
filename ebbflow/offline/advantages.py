"""The advantages of an offline stage's samples: computed once, over all shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from ebbflow.algorithms.advantages import compute_advantages
from ebbflow.data.schema import ADVANTAGES, KEY
from ebbflow.offline.shards import sum_phase_seconds
from ebbflow.stage import StageContext
from ebbflow.storage.tables import read_columns, read_table_metadata, write_table


def write_advantages(ctx: StageContext, scores: list[Path], path: Path) -> dict[str, float]:
    """Write the advantages of every sample worth training on, over all shards; return their
    statistics.

    Samples without a score and groups without variance are left out and counted in the statistics.
    """
    # The weights that the samples were scored with, so that no key of the recipe is read twice.
    weights = read_table_metadata(scores[0])["weights"]
    # Advantages may be normalised over all samples of the stage, so all shards are read at once: a
    # few numbers for each sample, no images and no latents.
    table = pa.concat_tables([read_columns(shard, [*KEY, "reward", *weights]) for shard in scores])
    prompt_ids = table["prompt_id"].to_numpy()
    rewards = {name: table[name].to_numpy() for name in weights}
    scored = np.isfinite(table["reward"].to_numpy())
    result = compute_advantages(rewards, weights, prompt_ids, ctx.config.advantages, scored=scored)
    columns = [prompt_ids, table["sample"].to_numpy(), result.values]
    batch = pa.record_batch(
        [pa.array(column[result.keep]) for column in columns], schema=ADVANTAGES
    )
    about = {
        "stage": ctx.stage_label,
        "metrics": result.metrics,
        "seconds": sum_phase_seconds(scores, "scoring"),
    }
    write_table(path, ADVANTAGES, [batch], about)
    return result.metrics
