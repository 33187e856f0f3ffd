"""Import a file of preference pairs in place of an offline stage's rollouts, scores and
advantages."""

from __future__ import annotations

import logging
from typing import NamedTuple

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact, make_node_output
from tasks.resources import accelerated_resources
from tasks.types import BaseModelArtifact

logger = logging.getLogger(__name__)


class PairTables(NamedTuple):
    """The tables that the stage trains on, as its own rollouts would give them."""

    prompts: FlyteFile
    rollouts: list[FlyteFile]
    advantages: FlyteFile


@task(cache=ONCE_PER_RUN, **accelerated_resources())
def import_pairs(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    prompts: FlyteFile,
    round: int,
    stage: int,
) -> PairTables:
    """Import the pairs as prompts (``PROMPTS``), rollout shards (``rollout_schema``) and advantages
    (``ADVANTAGES``).
    """
    from ebbflow.offline.pairs import import_pairs_from_folder
    from ebbflow.stage import StageContext
    from ebbflow.storage.tables import read_table
    from ebbflow.tracking.child_run import open_node_run

    ctx = StageContext(recipe, round, stage)
    pairs = ctx.offline_config.pairs
    assert pairs
    node = f"{ctx.stage_label} pairs"
    with open_node_run(run, node) as run_logger:
        source = fetch_artifact(FlyteFile(pairs))
        folder = make_node_output(run, node, "pairs")
        imported = import_pairs_from_folder(
            ctx, fetch_artifact(base.folder), fetch_artifact(prompts), source, folder
        )
        logger.info("%s", imported)
        run_logger.log_dataset(
            "pairs", read_table(imported.prompts), context="training", source=pairs
        )
        run_logger.log_metrics(
            {
                "pairs": imported.pairs,
                "ties": imported.ties,
                "on_evaluated_prompts": imported.evaluated,
            },
            step=0,
        )
    return PairTables(
        FlyteFile(str(imported.prompts)),
        [FlyteFile(str(shard)) for shard in imported.rollouts],
        FlyteFile(str(imported.advantages)),
    )
