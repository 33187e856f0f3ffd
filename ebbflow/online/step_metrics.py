"""Metrics of a step of an online stage: age of its samples, scores, speed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np
import torch

from ebbflow.online.messages import RolloutBatch, TraceSpan
from ebbflow.online.timeline import sum_seconds_by_task
from ebbflow.rewards.combine import ScoreTable
from ebbflow.stage import StageContext
from ebbflow.training.distributed import Ranks


def measure_freshness(batch: RolloutBatch, version: int) -> dict[str, float]:
    """Age of the samples in training steps, how many were too old, and the time that the weights
    took to reach the workers.
    """
    ages = batch.compute_staleness(version)
    return {
        "staleness/mean": fmean(ages),
        "staleness/max": max(ages),
        "staleness/dropped_samples": batch.num_dropped,
        "push/receive_seconds": max(part.report.receive_seconds for part in batch.parts),
    }


def compute_score_means(scores: ScoreTable) -> dict[str, float]:
    """The mean of every metric that scored something, as it is logged."""
    return {
        f"score/{name}": float(np.nanmean(values))
        for name, values in scores.metrics.items()
        if np.isfinite(values).any()
    }


def measure_speed(spans: Sequence[TraceSpan], images: int, seconds: float) -> dict[str, float]:
    """Seconds and milliseconds per image of each task of a step, and of the step itself, in which
    tasks may overlap.
    """
    spent = sum_seconds_by_task(spans) | {"step": seconds}
    metrics = {f"seconds/{task}": value for task, value in spent.items()}
    metrics |= {f"ms_per_image/{task}": 1000 * value / images for task, value in spent.items()}
    return metrics | {"images_per_second": images / seconds}


def count_gpus(ctx: StageContext) -> float:
    """Count the GPUs of all workers of the stage."""
    if ctx.online_config.placement == "ray":
        return float(
            sum(workers.count * workers.gpus for _, workers in ctx.online_config.resources)
        )
    return float(Ranks.current().world * torch.cuda.is_available())
