"""Two evaluations side by side: their metrics, their pictures, and the reward of every prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ebbflow.data.records import Evaluation
from ebbflow.data.schema import KEY
from ebbflow.evaluation.distribution import estimate_best_of
from ebbflow.evaluation.statistics import average_over_prompts
from ebbflow.plots import charts
from ebbflow.recipe import Recipe
from ebbflow.report.categories import keep_finite
from ebbflow.report.pictures import (
    HELD_OUT,
    MAX_PREVIEW_WIDTH,
    build_changed_rows,
    build_first_rows,
)


def list_metrics(recipe: Recipe, evaluations: Sequence[Evaluation]) -> list[str]:
    """List the metrics to show, in order: the total reward unless it equals the only one, trained
    rewards, exact match, guardrails.
    """
    trained = [reward.column for reward in recipe.rewards]
    metrics = [*trained, "exact_match", *(guardrail.column for guardrail in recipe.guardrails)]
    # With one reward the sum is that reward, and a second equal column would only take room.
    if len(trained) > 1 or trained[0] not in evaluations[0].held_out:
        metrics.insert(0, "reward")
    # Guardrails that no evaluation could measure would be empty columns.
    measured: set[str] = set()
    for evaluation in evaluations:
        measured |= keep_finite(evaluation.held_out).keys()
    return [metric for metric in metrics if metric in measured]


def name_trained_reward(recipe: Recipe) -> str:
    """Name the number under a picture: the only reward, or the weighted sum."""
    # With another weight than 1, the number is a multiple of the score and has no name of its own.
    first = recipe.rewards[0]
    if len(recipe.rewards) == 1 and first.weight == 1:
        return charts.format_metric_name(first.column)
    return "Reward"


def build_pictures(
    pictured: Sequence[tuple[Evaluation, Path]],
    against: tuple[Evaluation, Path],
    after: tuple[Evaluation, Path],
    metrics: Sequence[str],
) -> dict[str, Any]:
    """Build the pictures of the first prompts, and those of the prompts that changed most.

    Args:
        pictured: evaluations with a column of pictures.
        against, after: the sides that are compared.
    """
    compared = against[0].label, after[0].label
    # Only the two compared sides are embedded at full size: the page must stay small.
    fell, rose = build_changed_rows(against[1], after[1], compared, metrics)
    labelled = [(evaluation.label, path) for evaluation, path in pictured]
    rows = build_first_rows(labelled, metrics, compared)
    width = max(
        (cell.width for row in rows for cell in row.cells if cell), default=MAX_PREVIEW_WIDTH
    )
    # At least 128, a whole multiple of the glyph model's 32 pixels: each pixel stays a square.
    return {
        "rows": rows,
        "fell": fell,
        "rose": rose,
        "picture_width": min(max(width, 128), MAX_PREVIEW_WIDTH),
    }


def compare_by_prompt(
    recipe: Recipe, against: tuple[Evaluation, Path], after: tuple[Evaluation, Path]
) -> dict[str, Any]:
    """Compare every prompt's reward as a scatter, and the best of k samples as a table."""
    # Without the column of pictures, which can be gigabytes.
    columns = [*KEY, "split", "reward"]
    tables = [
        pq.read_table(path, columns=columns, filters=[HELD_OUT]) for _, path in (after, against)
    ]
    means = average_over_prompts("reward", *tables)
    # Paired by prompt, [P]: each prompt has the same noise on both sides.
    differences = means["candidate"] - means["champion"]
    # Powers of two below the number of samples, and that number.
    samples = recipe.evaluation.samples
    counts = [*(k for k in (1, 2, 4, 8, 16, 32, 64) if k < samples), samples]
    best = [
        (evaluation.label, [estimate_best_of(*_read_rewards(table), k, counts[-1]) for k in counts])
        for (evaluation, _), table in zip((against, after), reversed(tables), strict=True)
    ]
    return {
        "scatter": charts.plot_scatter(
            means["champion"].tolist(), means["candidate"].tolist(), "reward"
        ),
        "moved": [int(rows.sum()) for rows in (differences > 0, differences < 0, differences == 0)],
        "best_counts": counts,
        "best": [(label, values) for label, values in best if values[-1] is not None],
        "against": against[0],
    }


def _read_rewards(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Read prompts and rewards of the samples, NaN where there is none."""
    rewards = table["reward"].to_pandas().to_numpy(np.float64, na_value=np.nan)
    return table["prompt_id"].to_numpy(), rewards
