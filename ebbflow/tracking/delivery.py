"""How each kind of record is written to MLflow, so that writing it again changes nothing."""

from __future__ import annotations

import io
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Param
from PIL import Image

# Limits of MLflow: it refuses a request with more parameters, and cuts a longer value off without
# a mark.
PARAMS_PER_BATCH = 100
MAX_PARAM_LENGTH = 6000


def flatten_settings(value: Any, prefix: str = "") -> dict[str, str]:
    """Flatten nested settings: ``{"stages": [{"optimizer": {"lr": 3e-4}}]}`` becomes
    ``{"stages.0.optimizer.lr": "0.0003"}``.
    """
    if isinstance(value, Mapping):
        items: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        return {prefix: str(value)}
    # an empty list says something too, such as "no guardrails", and would vanish below
    if not items:
        return {prefix: "[]" if isinstance(value, (list, tuple)) else "{}"}
    return {
        key: text
        for name, item in items
        for key, text in flatten_settings(item, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def log_params(client: MlflowClient, run_id: str, params: Mapping[str, str]) -> None:
    """MLflow's parameters are immutable: writing the same ones again on a retry is a no-op, others
    are refused.
    """
    entities = []
    for key, value in params.items():
        if len(value) > MAX_PARAM_LENGTH:
            note = f" … ({len(value)} characters)"
            value = value[: MAX_PARAM_LENGTH - len(note)] + note
        entities.append(Param(key, value))
    for start in range(0, len(entities), PARAMS_PER_BATCH):
        client.log_batch(run_id, params=entities[start : start + PARAMS_PER_BATCH])


def _log_image(client: MlflowClient, run_id: str, key: str, content: bytes, step: int) -> None:
    # MLflow names the file "<key>+step+<step>+timestamp+<ms>+<uuid>", so a repetition would be a
    # second image at the same step
    start = f"images/{re.sub('/', '~', key)}+step+{step}+"
    if not any(entry.path.startswith(start) for entry in client.list_artifacts(run_id, "images")):
        client.log_image(run_id, Image.open(io.BytesIO(content)), key=key, step=step)


def _log_file(client: MlflowClient, run_id: str, path: str, content: bytes) -> None:
    # log_artifact takes a file and keeps its name; log_text would take no bytes
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / Path(path).name
        file.write_bytes(content)
        client.log_artifact(
            run_id, str(file), None if Path(path).parent == Path() else Path(path).parent.as_posix()
        )


def _log_table(client: MlflowClient, run_id: str, file: str, text: str) -> None:
    folder = str(Path(file).parent)
    if any(
        entry.path == file
        for entry in client.list_artifacts(run_id, None if folder == "." else folder)
    ):
        client.log_text(run_id, text, file)  # log_table would append the rows again
    else:
        # also tags the run, without which the UI shows no table
        client.log_table(run_id, pd.DataFrame(**json.loads(text)), file)


def _log_dataset(client: MlflowClient, run_id: str, dataset: dict[str, str], context: str) -> None:
    # the store finds a dataset by name and digest, so a repetition adds none
    client.log_inputs(
        run_id,
        datasets=[DatasetInput(Dataset(**dataset), [InputTag("mlflow.data.context", context)])],
    )


def _log_tag(client: MlflowClient, run_id: str, key: str, value: str) -> None:
    client.set_tag(run_id, key, value)


WRITERS: dict[str, Callable[..., object]] = {
    "params": log_params,
    "image": _log_image,
    "table": _log_table,
    "dataset": _log_dataset,
    "file": _log_file,
    "tag": _log_tag,
}
"""The writer of each kind of record: ``(client, run_id, **record.arguments)``."""
