"""Whether a champion was trained on prompts that a run holds out.

That happens where a prompt file has changed, the split of files was another one, or
``prompts.held_out_source`` is new. The champion then scores too well on what it has learnt, and
candidates that are better are refused.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

import mlflow.artifacts

from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.twins import hash_input
from ebbflow.registry.lock import CHAMPION, find_version_by_alias
from ebbflow.registry.model_version import EVIDENCE, check_store_exists, raise_registry_errors
from ebbflow.tracking.store import connect_to_store

TRAINING_TABLE = "training.parquet"
"""The file of the evidence with the prompts that a version was trained on."""
TRAINING_STORED = "ebbflow.training_prompts_stored"
"""The tag that says whether the training prompts are stored, or only their digest."""

logger = logging.getLogger(__name__)


def describe_trained_prompts(
    tracking_uri: str, model_name: str, held_out: Sequence[Prompt]
) -> str | None:
    """Say how many of a run's held-out prompts the champion was trained on; None where there is no
    champion, where it was trained on none, or where it does not say.

    Raises:
        RegistryError: the store cannot be read.
    """
    check_store_exists(tracking_uri)
    client = connect_to_store(tracking_uri)
    with raise_registry_errors(f"read what {model_name!r} was trained on", tracking_uri):
        champion = find_version_by_alias(client, model_name, CHAMPION)
        if champion is None:
            return None
        if champion.tags.get(TRAINING_STORED) != "true":
            logger.info("version %s does not say what it was trained on", champion.version)
            return None
        uri = client.get_model_version_download_uri(model_name, champion.version)
        with tempfile.TemporaryDirectory(prefix="ebbflow-trained-") as folder:
            path = mlflow.artifacts.download_artifacts(
                f"{uri}/{EVIDENCE}/{TRAINING_TABLE}", dst_path=folder, tracking_uri=tracking_uri
            )
            trained = {hash_input(prompt) for prompt in read_prompts(Path(path), "train")}
    shared = [prompt for prompt in held_out if hash_input(prompt) in trained]
    if not shared:
        return None
    return (
        f"the champion of {model_name!r}, version {champion.version}, was trained on {len(shared)}"
        f" of the {len(held_out)} held-out prompts of this run, first {shared[0].prompt[:60]!r}:"
        " its scores on them are too good, and a better candidate may be refused. Hold out prompts"
        " that it has not seen (prompts.held_out_source), or restore the prompt file that it was"
        " trained with"
    )
