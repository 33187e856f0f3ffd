"""The page on which two runs are side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbflow.comparison.runs import (
    RunFolder,
    find_common_prompts,
    find_recipe_differences,
    list_score_columns,
)
from ebbflow.formatting import format_number
from ebbflow.plots.overlays import plot_overlaid_metric, plot_overlaid_panels
from ebbflow.report.page_environment import create_result_environment
from ebbflow.report.pictures import MAX_PREVIEW_WIDTH, build_first_rows
from ebbflow.storage.disk import write_text

MAX_STAGES = 8
"""Stages whose curves are drawn; of more, the last ones that either run has."""


def write_run_page(path: Path, first: RunFolder, second: RunFolder) -> None:
    """Write one HTML file without references to others or the network."""
    runs = (first, second)
    names = [run.name for run in runs]
    stages = list(dict.fromkeys([*first.stages, *second.stages]))
    metrics = list(
        dict.fromkeys(
            column
            for run in runs
            for column in list_score_columns(run.evaluations[run.shown_evaluation])
        )
    )
    template = create_result_environment(Path(__file__).parent).get_template("runs.html")
    page = template.render(
        runs=runs,
        names=names,
        facts=[_describe_run(run) for run in runs],
        recipe_differences=find_recipe_differences(first, second),
        metrics=metrics,
        held_out=_pair_evaluations(first, second, metrics),
        progress=[_plot_progress(runs, metric) for metric in metrics],
        curves=[
            (stage, plot_overlaid_panels({run.name: run.stages.get(stage, []) for run in runs}))
            for stage in stages[-MAX_STAGES:]
        ],
        hidden=max(0, len(stages) - MAX_STAGES),
        **_build_pictures(first, second, metrics),
    )
    write_text(path, page)


def _describe_run(run: RunFolder) -> dict[str, str]:
    """Describe the outcome of a run, for a table with a column per run."""
    summary = run.summary
    facts = {"Recipe": run.recipe.get("name", "–"), "Seed": run.recipe.get("seed", "–")}
    if not summary:
        return facts | {"State": "not finished", "Last evaluation": run.shown_evaluation}
    outcome = "promoted" if summary["promoted"] else "not promoted"
    return facts | {
        "State": f"{outcome}, version {summary['model_version']}",
        "Candidate": summary["candidate"],
        "Compared with": summary["champion"],
        "Seconds": format_number(summary["seconds"].get("run", summary["seconds"]["total"])),
    }


def _pair_evaluations(
    first: RunFolder, second: RunFolder, metrics: Sequence[str]
) -> list[tuple[str, list[tuple[float | None, float | None]]]]:
    """Pair the held-out means of the evaluations with the same label, by metric."""
    labels = dict.fromkeys([*first.held_out, *second.held_out])
    return [
        (
            label,
            [
                (first.held_out.get(label, {}).get(name), second.held_out.get(label, {}).get(name))
                for name in metrics
            ],
        )
        for label in labels
    ]


def _plot_progress(runs: Sequence[RunFolder], metric: str) -> Any:
    series: dict[str, list[Mapping[str, float]]] = {}
    for run in runs:
        # Evaluations are counted: the labels of two runs with other stages mean different things.
        series[run.name] = [
            {"step": index, metric: means[metric]}
            for index, means in enumerate(run.held_out.values())
            if metric in means
        ]
    return plot_overlaid_metric(series, metric)


def _build_pictures(first: RunFolder, second: RunFolder, metrics: Sequence[str]) -> dict[str, Any]:
    """Build the rows of the prompts that both runs hold out; none where they share none."""
    common = find_common_prompts(first, second)
    shown = [
        (run.shown_evaluation, run.evaluations[run.shown_evaluation]) for run in (first, second)
    ]
    # With the run's name: both evaluations may be of "1.1 online".
    titles = [
        f"{run.name}, {label}" for run, (label, _) in zip((first, second), shown, strict=True)
    ]
    pictured = list(zip(titles, [samples for _, samples in shown], strict=True))
    rows = build_first_rows(pictured, metrics, titles, common)
    width = max(
        (cell.width for row in rows for cell in row.cells if cell), default=MAX_PREVIEW_WIDTH
    )
    return {
        "rows": rows,
        "titles": titles,
        "trained": "Reward",
        "picture_width": min(max(width, 128), MAX_PREVIEW_WIDTH),
    }
