"""What the pipeline's nodes log: evaluations, the gate's decision, stages and shards."""

from __future__ import annotations

from pathlib import Path

from ebbflow.data.records import Evaluation, GateDecision, StageRecord
from ebbflow.data.schema import name_statistic_column
from ebbflow.plots.images import PICTURED, build_image_grid, format_caption
from ebbflow.storage.tables import count_rows, read_table, read_table_metadata
from ebbflow.tracking.child_run import RunLogger
from ebbflow.tracking.curves import build_evaluation_curves
from ebbflow.tracking.delivery import flatten_settings


def log_evaluation(
    run_logger: RunLogger, evaluation: Evaluation, samples: Path, global_step: int | None = None
) -> None:
    """Log both splits' means, drift and times by policy version, the table of all samples and a
    grid of held-out ones.

    Args:
        global_step: training steps of the run so far, at which the parent run gets the means; None
            for another run's policy.
    """
    # The node's own run counts by policy version, the parent by training steps of the run: there
    # the points of all evaluations lie below the training reward.
    means = build_evaluation_curves(evaluation)
    if global_step is not None:
        run_logger.log_curves(means, global_step)
    metrics = means | {
        name_statistic_column(name): value for name, value in evaluation.statistics.items()
    }
    metrics |= _flatten_distributions(evaluation)
    metrics |= {f"seconds/{phase}": value for phase, value in evaluation.seconds.items()}
    metrics |= {"velocity_drift": evaluation.velocity_drift, "coverage": evaluation.coverage}
    run_logger.log_metrics(metrics, evaluation.policy_version)
    table = read_table(samples)
    run_logger.log_metrics(
        {"scoring_failures": table.num_rows - table["failure"].null_count},
        evaluation.policy_version,
    )
    run_logger.log_table("samples", table)
    # the same prompts and noise in each evaluation, so that grids can be compared
    pictured = [row for row in table.to_pylist() if row["split"] == "held_out"][:PICTURED]
    grid = build_image_grid(
        [row["image"] for row in pictured], [format_caption(row) for row in pictured], columns=4
    )
    run_logger.log_image("held_out", grid, evaluation.policy_version)


def _flatten_distributions(evaluation: Evaluation) -> dict[str, float]:
    distributions = {
        # best_of is None where no prompt has several samples
        name: one.model_dump(exclude_none=True)
        for name, one in evaluation.distributions.items()
    }
    return {
        f"held_out_{part}/{name}": value
        for name, parts in distributions.items()
        for part, value in parts.items()
    }


def log_decision(run_logger: RunLogger, decision: GateDecision) -> None:
    """Log what the gate compared and decided."""
    # step 0 throughout: a decision is a single point
    compared = {one.metric: one for one in (decision.target, *decision.guardrails)}
    compared |= {name_statistic_column(one.metric): one for one in decision.statistics}
    for metric, comparison in compared.items():
        values = comparison.model_dump(
            include={"champion", "candidate", "difference", "low", "high"}
        )
        run_logger.log_metrics(
            {f"{metric}/{name}": value for name, value in values.items()}, step=0
        )
    run_logger.log_metrics(
        {"promote": float(decision.promote), "coverage": decision.coverage}, step=0
    )
    run_logger.log_params({"candidate": decision.candidate, "champion": decision.champion})


def log_stage(run_logger: RunLogger, record: StageRecord) -> None:
    """Log what a training stage did, as parameters."""
    run_logger.log_params(flatten_settings(record.model_dump()))


def log_shard(run_logger: RunLogger, path: Path) -> None:
    """Log a shard's own metadata, and its cost per image.

    Every shard is a child run of its own, so shards that run at the same time write no metric of
    each other.
    """
    metadata = read_table_metadata(path)
    images = count_rows(path)
    seconds = metadata.pop("seconds")
    run_logger.log_params(flatten_settings(metadata))
    metrics = {f"seconds/{phase}": value for phase, value in seconds.items()}
    metrics |= {f"ms_per_image/{phase}": 1000 * value / images for phase, value in seconds.items()}
    run_logger.log_metrics(
        metrics | {"images": images, "images_per_second": images / sum(seconds.values())}, step=0
    )
