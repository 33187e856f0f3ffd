"""Import captioned data in place of an offline stage's prompts and advantages, with the digests of
all pictures.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact, fetch_data, make_node_output
from tasks.resources import downloader_resources
from tasks.types import BaseModelArtifact

logger = logging.getLogger(__name__)


class DataTables(NamedTuple):
    """The prompts and advantages that the stage trains on, as its own rollouts would give them;
    ``encoding`` is the digest of pictures, VAE and sizes.
    """

    prompts: FlyteFile
    advantages: FlyteFile
    encoding: str


@task(cache=ONCE_PER_RUN, **downloader_resources())
def import_data(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    prompts: FlyteFile,
    round: int,
    stage: int,
) -> DataTables:
    """Import captions as prompts (``PROMPTS``) and advantages (``ADVANTAGES``), and log the data as
    an input of the run.
    """
    from ebbflow.offline.data import import_data as import_tables
    from ebbflow.stage import StageContext
    from ebbflow.storage.tables import read_table
    from ebbflow.tracking.child_run import open_node_run

    ctx = StageContext(recipe, round, stage)
    config = ctx.config.captioned_data
    assert config
    node = f"{ctx.stage_label} data"
    with open_node_run(run, node) as run_logger:
        imported = import_tables(
            ctx,
            config,
            fetch_data(config.path),
            fetch_artifact(base.folder),
            fetch_artifact(prompts),
            make_node_output(run, node, "data"),
        )
        logger.info("%s", imported)
        run_logger.log_dataset(
            "data", read_table(imported.prompts), context="training", source=config.path
        )
        run_logger.log_tags({"data_digest": imported.digest, "encoding_digest": imported.encoding})
        run_logger.log_metrics(
            {
                "pictures": imported.pictures,
                "on_evaluated_prompts": imported.evaluated,
                "files_without_row": imported.unlisted,
            },
            step=0,
        )
    return DataTables(
        FlyteFile(str(imported.prompts)), FlyteFile(str(imported.advantages)), imported.encoding
    )
