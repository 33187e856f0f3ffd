"""What a stage on Ray left behind, and when its processes have ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
from safetensors.torch import load_file

from ebbflow.data.records import StageRecord
from ebbflow.stage import MetricsRecorder
from ebbflow.storage.artifacts import verify_folder

CPUS = 2
TIMED = ("seconds/", "ms_per_image/", "images_per_second", "push/", "utilisation/", "workers/")


@dataclass(frozen=True)
class StageOutcome:
    """What a stage left behind: the policy's parameters, the metrics of its steps without those of
    time, and its record.
    """

    parameters: dict[str, torch.Tensor]
    metrics: list[dict[str, float]]
    replaced: float
    record: StageRecord


def read_outcome(folder: Path, recorder: MetricsRecorder, record: StageRecord) -> StageOutcome:
    verify_folder(folder)
    kept_metrics = [
        {k: v for k, v in row.items() if not k.startswith(TIMED)} for row in recorder.metrics_rows
    ]
    parameters = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    replaced = recorder.metrics_rows[-1]["workers/replaced"]
    return StageOutcome(parameters, kept_metrics, replaced, record)


def assert_same(one: StageOutcome, other: StageOutcome) -> None:
    assert one.metrics == other.metrics
    assert one.parameters.keys() == other.parameters.keys()
    assert all(torch.equal(value, other.parameters[name]) for name, value in one.parameters.items())
    assert (one.record.samples, one.record.optimizer_steps) == (
        other.record.samples,
        other.record.optimizer_steps,
    )


def wait_until_gone(pids: list[int]) -> None:
    """Ends when these processes have ended and Ray has got their cores back."""
    while (
        any(Path(f"/proc/{pid}").exists() for pid in pids)
        or ray.available_resources().get("CPU") != CPUS
    ):
        time.sleep(0.1)
