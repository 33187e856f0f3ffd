"""What passes between tasks beside single files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from pydantic import BaseModel, BeforeValidator

from ebbflow.data.records import Evaluation, StageRecord

GONE = "{} is gone, but Flyte's local cache still points to it; run `pyflyte local-cache clear` and start again"
"""What lies in a temporary folder may not last as long as the cache does."""


def _still_there(folder: Any) -> Any:
    path = folder.get("path") if isinstance(folder, dict) else None
    if isinstance(path, str) and "://" not in path and not Path(path).exists():
        raise ValueError(GONE.format(path))
    return folder


Folder = Annotated[FlyteDirectory, BeforeValidator(_still_there)]


class BaseModelArtifact(BaseModel):
    """A committed base-model folder; ``finished_at`` (seconds since 1970) tells a cached one from one made in this run."""

    folder: Folder
    seconds: float
    finished_at: float


class TrainedPolicy(BaseModel):
    """A committed policy folder, and how the stage that made it went (nothing for the untouched base model).

    The record and the metrics (a JSON list, one object per step) hold wall times; the folder holds none, so that the same recipe
    gives the same bytes.
    """

    folder: Folder
    record: StageRecord | None = None
    metrics: FlyteFile | None = None


class EvaluatedPolicy(BaseModel):
    """A policy with its evaluation and the samples behind it (``evaluation_schema``)."""

    policy: TrainedPolicy
    evaluation: Evaluation
    samples: FlyteFile


class ChampionPolicy(BaseModel):
    """What the candidate has to beat: a registered version, or the base model where there is none yet."""

    version: str | None
    evaluated: EvaluatedPolicy
