"""Typed values that tasks exchange besides single files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Self

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from pydantic import BaseModel, BeforeValidator

from ebbflow.data.records import Evaluation, GateDecision, StageRecord
from tasks.cache import LOCAL_CACHE

GONE = "{} is gone, but Flyte's local cache still points to it; delete {} and start again"
"""A temporary folder may be deleted before the cache is."""


def _check_folder_exists(folder: Any) -> Any:
    # A value from Flyte's local cache, which may outlive the folder that it points to.
    path = folder.get("path") if isinstance(folder, dict) else None
    if isinstance(path, str) and "://" not in path and not Path(path).exists():
        raise ValueError(GONE.format(path, LOCAL_CACHE))
    return folder


Folder = Annotated[FlyteDirectory, BeforeValidator(_check_folder_exists)]


# The docstrings of these types go into the JSON schemas of every Flyte interface that has them, and
# a workflow's closure has a limit (2 MB by default): keep them short.
class BaseModelArtifact(BaseModel):
    """A committed base-model folder; ``finished_at`` (seconds since 1970) tells whether this run
    made it or the cache had it.
    """

    folder: Folder
    seconds: float
    finished_at: float

    @classmethod
    def from_new_folder(cls, folder: Path, started: float) -> Self:
        """Describe a folder that was made since ``started`` (seconds since 1970)."""
        now = time.time()
        return cls(folder=FlyteDirectory(str(folder)), seconds=now - started, finished_at=now)


class FinishedStage(BaseModel):
    """What a training stage did: its record, and its metrics as a JSON list with one object per
    step. Both contain wall times.
    """

    record: StageRecord
    metrics: FlyteFile


class TrainedPolicy(BaseModel):
    """A committed policy folder, with the record and the metrics of the stage that made it (None
    for the base model).

    Record and metrics (a JSON list, one object per step) contain wall times. The folder contains
    none, so that the same recipe gives the same bytes.
    """

    folder: Folder
    record: StageRecord | None = None
    metrics: FlyteFile | None = None
    global_step: int = 0
    """Training steps of the run so far: where the next stage's curves begin."""
    branch_stages: list[FinishedStage] = []
    """The stages of the branches that the stage learned from."""
    was_trained: bool = False
    """Whether the run starts from it and an earlier one trained it."""

    @classmethod
    def from_stage(
        cls, policy: TrainedPolicy, folder: Path, metrics: Path, record: StageRecord, steps: int
    ) -> Self:
        """Describe what a stage made of ``policy`` in ``steps`` training steps."""
        return cls(
            folder=FlyteDirectory(str(folder)),
            record=record,
            metrics=FlyteFile(str(metrics)),
            global_step=policy.global_step + steps,
        )

    @property
    def finished_stages(self) -> list[FinishedStage]:
        """Those of branches, then the policy's own."""
        stages = list(self.branch_stages)
        if self.record and self.metrics:  # the base model has neither
            stages.append(FinishedStage(record=self.record, metrics=self.metrics))
        return stages


class EvaluatedPolicy(BaseModel):
    """A policy with its evaluation and the samples behind it (``evaluation_schema``)."""

    policy: TrainedPolicy
    evaluation: Evaluation
    samples: FlyteFile

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """Short: ``pyflyte run`` prints its outputs."""
        return [("label", self.evaluation.label), ("policy", str(self.policy.folder.path))]


class SpecialistPolicy(BaseModel):
    """What a branch hands on: its best policy if its gate passed that, else the policy that it
    began with.
    """

    branch: str
    policy: TrainedPolicy
    decision: GateDecision
    stages: list[FinishedStage] = []
    """All of the branch, also those after the policy that was chosen."""

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """Short: ``pyflyte run`` prints its outputs."""
        return [("branch", self.branch), ("passed", self.decision.promote)]


class AnchorPolicy(BaseModel):
    """What the candidate may not fall far below: the last version that a person approved, or the
    base model.
    """

    label: str
    evaluated: EvaluatedPolicy


class ChampionPolicy(BaseModel):
    """What the candidate must beat: a registered version, or the run's own start if there is none
    yet.
    """

    version: str | None
    evaluated: EvaluatedPolicy
    anchor: AnchorPolicy | None = None
    promoted_reward: float | None = None
