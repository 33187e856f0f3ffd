"""What the pipeline's nodes log: evaluations, the gate's decision, stages and shards."""

from __future__ import annotations

from pathlib import Path

from ebbflow.data.records import Evaluation, StageRecord, Verdict
from ebbflow.plots.images import PICTURED, caption, image_grid
from ebbflow.storage.tables import read_table, read_table_metadata, row_count
from ebbflow.tracking.child_run import RunLogger
from ebbflow.tracking.delivery import flatten


def log_evaluation(node: RunLogger, evaluation: Evaluation, samples: Path) -> None:
    """Log both splits' means, drift and times by policy version, the table of all samples and a grid of held-out ones."""
    metrics = {f"held_out/{name}": value for name, value in evaluation.held_out.items()}
    metrics |= {f"validation/{name}": value for name, value in evaluation.validation.items()}
    metrics |= {f"seconds/{phase}": value for phase, value in evaluation.seconds.items()}
    metrics |= {"velocity_drift": evaluation.velocity_drift, "coverage": evaluation.coverage}
    node.log_metrics(metrics, evaluation.policy_version)
    table = read_table(samples)
    node.log_metrics({"scoring_failures": table.num_rows - table["failure"].null_count}, evaluation.policy_version)
    node.log_table("samples", table)
    shown = [row for row in table.to_pylist() if row["split"] == "held_out"][:PICTURED]
    grid = image_grid([row["image"] for row in shown], [caption(row) for row in shown], columns=4)
    node.log_image("held_out", grid, evaluation.policy_version)


def log_verdict(node: RunLogger, verdict: Verdict) -> None:
    """Log what the gate compared and decided."""
    for comparison in (verdict.target, *verdict.guards):
        values = comparison.model_dump(include={"champion", "candidate", "difference", "low", "high"})
        node.log_metrics({f"{comparison.metric}/{name}": value for name, value in values.items()}, step=0)
    node.log_metrics({"promote": float(verdict.promote), "coverage": verdict.coverage}, step=0)
    node.log_params({"candidate": verdict.candidate, "champion": verdict.champion})


def log_stage(node: RunLogger, record: StageRecord) -> None:
    """Log what a training stage did, as parameters."""
    node.log_params(flatten(record.model_dump()))


def log_shard(node: RunLogger, path: Path) -> None:
    """Log a shard's own metadata, and its cost per image."""
    metadata = read_table_metadata(path)
    images = row_count(path)
    seconds = metadata.pop("seconds")
    node.log_params(flatten(metadata))
    metrics = {f"seconds/{phase}": value for phase, value in seconds.items()}
    metrics |= {f"ms_per_image/{phase}": 1000 * value / images for phase, value in seconds.items()}
    node.log_metrics(metrics | {"images": images, "images_per_second": images / sum(seconds.values())}, step=0)
