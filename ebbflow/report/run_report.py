"""The report of a run: one self-contained HTML page, summary.json, and a table for the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from ebbflow.data.records import (
    CategoryMeans,
    Distribution,
    Evaluation,
    GateDecision,
    Registration,
    StageRecord,
    TrackedRun,
)
from ebbflow.data.schema import KEY
from ebbflow.evaluation.categories import average_over_categories
from ebbflow.evaluation.distribution import estimate_best_of
from ebbflow.evaluation.gate import REFUSED
from ebbflow.evaluation.statistics import average_over_prompts
from ebbflow.formatting import format_difference, format_duration, format_number
from ebbflow.plots import charts
from ebbflow.plots.pages import create_page_environment
from ebbflow.recipe import Recipe
from ebbflow.registry.serving import how_to_load
from ebbflow.report.glossary import build_glossary
from ebbflow.report.pictures import (
    HELD_OUT,
    MAX_PREVIEW_WIDTH,
    build_changed_rows,
    build_first_rows,
)
from ebbflow.report.run_facts import RunFacts
from ebbflow.storage.disk import write_text

MAX_COLUMNS = 6
"""Evaluations in the image grid; of more, the first, the last ones and the chosen one are shown."""
MAX_CURVES = 8
"""Stages whose curves are drawn; of more, the last ones."""


@dataclass(frozen=True)
class ReportInputs:
    """Everything that the report shows."""

    recipe: Recipe
    tracked: TrackedRun
    evaluations: Sequence[tuple[Evaluation, Path]]
    """In the order of the run, its start first, each with its samples (Parquet,
    ``evaluation_schema``). A champion that is not the run's own start is one of them, under the
    label that the decision gives it.
    """
    stages: Sequence[tuple[StageRecord, Sequence[dict[str, float]]]]
    """Training stages with their metrics: one dictionary per step, with the key ``step``
    (``charts.PANELS``: what is drawn).
    """
    decision: GateDecision
    registration: Registration | None
    base_seconds: float
    """Seconds spent on the base model; 0 if it was cached."""
    outages: Sequence[str] = ()
    """A sentence per outage or refusal of MLflow
    (``ebbflow.tracking.outage.deliver_saved_records``).
    """
    facts: RunFacts | None = None
    """Wall times, machine, versions and commit (``ebbflow.report.run_facts``)."""
    policy: str | None = None
    """Path or URI of the candidate's policy folder."""
    base: str | None = None
    """Path or URI of the run's base-model folder."""

    def __post_init__(self) -> None:
        labels = [evaluation.label for evaluation, _ in self.evaluations]
        if self.decision.candidate not in labels:
            raise ValueError(
                f"the decision is about {self.decision.candidate!r}, but the evaluations are"
                f" {labels}; add that one"
            )

    @property
    def first_evaluation(self) -> Evaluation:
        return self.evaluations[0][0]

    @property
    def candidate_evaluation(self) -> Evaluation:
        return next(
            evaluation
            for evaluation, _ in self.evaluations
            if evaluation.label == self.decision.candidate
        )

    @property
    def champion(self) -> Evaluation | None:
        """The champion, if it is not this run's own start."""
        others = (evaluation for evaluation, _ in self.evaluations[1:])
        return next(
            (evaluation for evaluation in others if evaluation.label == self.decision.champion),
            None,
        )

    @property
    def promoted(self) -> bool:
        return self.registration is not None and self.registration.champion

    @property
    def awaits_approval(self) -> bool:
        """Whether the gate approved and a person has yet to: until then the version stays
        challenger.
        """
        asked = self.recipe.promotion.approval is not None and self.decision.promote
        return asked and self.registration is not None and not self.promoted


class Times(NamedTuple):
    """How long a part of the run took.

    Attributes:
        wall: seconds on the clock; None where that is not known.
        phases: seconds that workers were busy by phase. Workers overlap, so these may add up to
            more.
    """

    wall: float | None
    phases: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.phases.values()) if self.wall is None else self.wall


def summarise_run(inputs: ReportInputs) -> dict[str, Any]:
    """The run in numbers, for programs. ``seconds`` are on the clock; ``total`` is that of the
    parts, ``run`` of everything.
    """
    seconds = {name: round(times.seconds, 3) for name, times in _measure_times(inputs).items()}
    whole = (
        {"run": round(inputs.facts.written_at - inputs.tracked.started_at, 3)}
        if inputs.facts
        else {}
    )
    return {
        "before": _keep_finite(inputs.first_evaluation.held_out),
        "after": _keep_finite(inputs.candidate_evaluation.held_out),
        "seconds": seconds | {"total": round(sum(seconds.values()), 3)} | whole,
        "candidate": inputs.decision.candidate,
        "champion": inputs.decision.champion,
        "promoted": inputs.promoted,
        "mlflow_run_id": inputs.tracked.run_id,
        "model_version": inputs.registration.version if inputs.registration else None,
        "policy": inputs.policy,
        "base": inputs.base,
        "load": _how_to_load(inputs),
        **({"categories": found} if (found := _summarise_categories(inputs)) else {}),
    }


def _summarise_categories(inputs: ReportInputs) -> dict[str, Any]:
    """By column of the prompt file and policy, the means of each category and, as ``overall``, the
    mean over the categories.
    """
    return {
        column: {
            when: {
                "overall": average_over_categories(categories),
                "values": {
                    category.value: {"prompts": category.prompts, **_keep_finite(category.means)}
                    for category in categories
                },
            }
            for when, categories in sides.items()
        }
        for column, sides in _group_categories(
            inputs.first_evaluation, inputs.candidate_evaluation
        ).items()
    }


def _group_categories(
    before: Evaluation, after: Evaluation
) -> dict[str, dict[str, list[CategoryMeans]]]:
    """The categories of each column, before and after."""
    columns = dict.fromkeys(category.column for category in after.categories)
    sides = {"before": before, "after": after}
    return {
        column: {
            when: [category for category in one.categories if category.column == column]
            for when, one in sides.items()
        }
        for column in columns
    }


class CategoryRow(NamedTuple):
    """A line of the table of a column: a category, or the mean over all of them."""

    name: str
    prompts: int | None
    was: dict[str, float]
    now: dict[str, float]


def _build_category_tables(inputs: ReportInputs) -> dict[str, list[CategoryRow]]:
    """By column, its categories and their mean, of what the gate compared."""
    tables = {}
    for column, sides in _group_categories(
        _find_compared_sides(inputs)[0][0], inputs.candidate_evaluation
    ).items():
        before = {category.value: category for category in sides["before"]}
        rows = [
            CategoryRow(
                one.value,
                one.prompts,
                before[one.value].means if one.value in before else {},
                one.means,
            )
            for one in sides["after"]
        ]
        overall = [average_over_categories(sides[when]) for when in ("before", "after")]
        tables[column] = [*rows, CategoryRow("mean of these", None, *overall)]
    return tables


def write_summary(path: Path, inputs: ReportInputs) -> None:
    """Write ``summarise_run`` as JSON."""
    write_text(path, json.dumps(summarise_run(inputs), indent=2, allow_nan=False) + "\n")


def format_summary_table(inputs: ReportInputs) -> str:
    """Evaluations by metrics, for the terminal; a star marks the candidate."""
    metrics = _list_metrics(inputs)
    table = [["", *(charts.format_metric_name(metric) for metric in metrics), "drift"]]
    for evaluation, _ in inputs.evaluations:
        mark = "*" if evaluation is inputs.candidate_evaluation else ""
        values = [format_number(evaluation.held_out.get(metric)) for metric in metrics]
        table.append([evaluation.label + mark, *values, f"{evaluation.velocity_drift:.2g}"])
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in table
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def write_report(path: Path, inputs: ReportInputs) -> None:
    """Write one HTML file without references to other files or the network."""
    environment = create_page_environment(Path(__file__).parent)
    environment.globals["refused"] = REFUSED
    environment.filters |= {
        "number": format_number,
        "signed": format_difference,
        "label": charts.format_metric_name,
        "duration": format_duration,
        "day": _format_day,
    }
    write_text(path, environment.get_template("report.html").render(_build_page(inputs)))


def _build_page(inputs: ReportInputs) -> dict[str, Any]:
    metrics = _list_metrics(inputs)
    shown = _select_evaluations(inputs)
    own_evaluations = [
        evaluation for evaluation, _ in inputs.evaluations if evaluation is not inputs.champion
    ]
    statistics = list(
        dict.fromkeys(
            name for evaluation, _ in inputs.evaluations for name in evaluation.statistics
        )
    )
    return {
        "inputs": inputs,
        "metrics": metrics,
        "guardrails": _list_guardrails(inputs.recipe),
        "meanings": build_glossary(
            inputs.recipe, [*metrics, inputs.decision.target.metric], statistics
        ),
        "trained": _name_trained_reward(inputs.recipe),
        "evaluations": [evaluation for evaluation, _ in inputs.evaluations],
        "shown": [evaluation for evaluation, _ in shown],
        "distributed": _list_distributions(inputs, metrics),
        "categories": _build_category_tables(inputs),
        "statistics": statistics,
        "progress": charts.plot_progress(
            own_evaluations, metrics, inputs.candidate_evaluation.label, inputs.champion
        ),
        "differences": charts.plot_differences(inputs.decision),
        "curves": [
            (record, charts.plot_training(steps)) for record, steps in inputs.stages[-MAX_CURVES:]
        ],
        "times": _measure_times(inputs),
        "recipe_yaml": yaml.safe_dump(inputs.recipe.model_dump(mode="json"), sort_keys=False),
        "problems": _list_problems(inputs),
        "how_to_load": _how_to_load(inputs),
        **_build_pictures(inputs, shown, metrics),
        **_compare_by_prompt(inputs),
    }


def _build_pictures(
    inputs: ReportInputs, shown: Sequence[tuple[Evaluation, Path]], metrics: Sequence[str]
) -> dict[str, Any]:
    against, after = _find_compared_sides(inputs)
    compared = against[0].label, after[0].label
    fell, rose = build_changed_rows(against[1], after[1], compared, metrics)
    rows = build_first_rows(shown, metrics, compared)
    width = max(
        (cell.width for row in rows for cell in row.cells if cell), default=MAX_PREVIEW_WIDTH
    )
    # whole multiples of the 32 pixels of the glyph model
    return {
        "rows": rows,
        "fell": fell,
        "rose": rose,
        "picture_width": 128 if width < 128 else min(width, MAX_PREVIEW_WIDTH),
    }


def _compare_by_prompt(inputs: ReportInputs) -> dict[str, Any]:
    """The scatter of every prompt's reward, and the best of k samples."""
    against, after = _find_compared_sides(inputs)
    columns = [*KEY, "split", "reward"]
    tables = [
        pq.read_table(path, columns=columns, filters=[HELD_OUT]) for _, path in (after, against)
    ]
    means = average_over_prompts("reward", *tables)
    moved = means["candidate"] - means["champion"]
    counts = sorted(
        {k for k in (1, 2, 4, 8, 16, 32, 64) if k < inputs.recipe.evaluation.samples}
        | {inputs.recipe.evaluation.samples}
    )
    best = [
        (evaluation.label, [estimate_best_of(*_read_rewards(table), k, counts[-1]) for k in counts])
        for (evaluation, _), table in zip((against, after), reversed(tables), strict=True)
    ]
    return {
        "scatter": charts.plot_scatter(
            means["champion"].tolist(), means["candidate"].tolist(), "reward"
        ),
        "moved": [int(found.sum()) for found in (moved > 0, moved < 0, moved == 0)],
        "best_counts": counts,
        "best": [(label, values) for label, values in best if values[-1] is not None],
        "against": against[0],
    }


def _read_rewards(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and rewards of the samples, NaN where there is none."""
    return table["prompt_id"].to_numpy(), table["reward"].to_pandas().to_numpy(
        np.float64, na_value=np.nan
    )


def _find_compared_sides(
    inputs: ReportInputs,
) -> tuple[tuple[Evaluation, Path], tuple[Evaluation, Path]]:
    """What the gate compared: the champion, or the run's start, and the candidate."""
    pairs = {
        evaluation.label: (evaluation, path) for evaluation, path in reversed(inputs.evaluations)
    }
    return pairs[(inputs.champion or inputs.first_evaluation).label], pairs[
        inputs.candidate_evaluation.label
    ]


def _list_problems(inputs: ReportInputs) -> list[str]:
    """What a person should know before anything else."""
    alarms = [f"{record.label}: {alarm}" for record, _ in inputs.stages for alarm in record.alarms]
    return [*alarms, *inputs.outages]


def _how_to_load(inputs: ReportInputs) -> str | None:
    """Python that loads the registered version, if there is one."""
    if inputs.registration is None:
        return None
    return how_to_load(
        inputs.tracked.tracking_uri, inputs.registration.model_name, inputs.registration.version
    )


def _name_trained_reward(recipe: Recipe) -> str:
    """What the number under a picture is: the only reward, or the weighted sum."""
    only = recipe.rewards[0] if len(recipe.rewards) == 1 and recipe.rewards[0].weight == 1 else None
    return charts.format_metric_name(only.column) if only else "Reward"


def _list_guardrails(recipe: Recipe) -> list[str]:
    return [guardrail.column for guardrail in recipe.guardrails]


def _list_metrics(inputs: ReportInputs) -> list[str]:
    """Metrics to show, in order: the total reward unless it equals the only one, trained rewards,
    exact match, guardrails.
    """
    trained = [reward.column for reward in inputs.recipe.rewards]
    combined = (
        [] if len(trained) == 1 and trained[0] in inputs.first_evaluation.held_out else ["reward"]
    )
    wanted = [*combined, *trained, "exact_match", *_list_guardrails(inputs.recipe)]
    return [
        metric
        for metric in wanted
        if any(
            _keep_finite(evaluation.held_out).get(metric) is not None
            for evaluation, _ in inputs.evaluations
        )
    ]


def _list_distributions(
    inputs: ReportInputs, metrics: Sequence[str]
) -> list[tuple[Evaluation, str, Distribution]]:
    """The distribution of every metric, before and after, and of the champion where it is another
    policy.
    """
    compared = [
        inputs.first_evaluation,
        *([inputs.champion] if inputs.champion else []),
        inputs.candidate_evaluation,
    ]
    return [
        (each, metric, each.distributions[metric])
        for metric in metrics
        for each in compared
        if metric in each.distributions
    ]


def _select_evaluations(inputs: ReportInputs) -> list[tuple[Evaluation, Path]]:
    evaluations = list(inputs.evaluations)
    if len(evaluations) <= MAX_COLUMNS:
        return evaluations
    kept = {0, *range(len(evaluations) - MAX_COLUMNS + 2, len(evaluations))}
    kept.add(
        next(
            index
            for index, (evaluation, _) in enumerate(evaluations)
            if evaluation is inputs.candidate_evaluation
        )
    )
    return [evaluations[index] for index in sorted(kept)]


def _measure_times(inputs: ReportInputs) -> dict[str, Times]:
    """Of the base model, of every stage, and of all evaluations together."""
    evaluating: dict[str, float] = {}
    for evaluation, _ in inputs.evaluations:
        for phase, seconds in evaluation.seconds.items():
            evaluating[phase] = evaluating.get(phase, 0.0) + seconds
    stages = {record.label: dict(record.seconds) for record, _ in inputs.stages}
    parts = {"base model": {"base model": inputs.base_seconds}, **stages, "evaluations": evaluating}
    return {
        name: Times(_measure_wall_seconds(inputs, name), phases) for name, phases in parts.items()
    }


def _measure_wall_seconds(inputs: ReportInputs, part: str) -> float | None:
    """Seconds on the clock of the nodes of a part of the run; None where none of them is known."""
    nodes = inputs.facts.nodes if inputs.facts else {}
    evaluating = {name for name in nodes if name.endswith(" evaluation")}
    own = {name for name in nodes if name == part or name.startswith(f"{part} ")} - evaluating
    names = evaluating if part == "evaluations" else own
    return inputs.facts.measure_wall_seconds(names) if inputs.facts and names else None


def _keep_finite(values: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in values.items() if math.isfinite(value)}


def _format_day(seconds: float) -> str:
    """Seconds since 1970 as a date and a time, UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%d %B %Y, %H:%M} UTC".lstrip("0")
