"""The report of a run: one self-contained HTML page, summary.json, and a table for the terminal."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import yaml
from PIL import Image

from ebbflow.data.records import Distribution, Evaluation, GateDecision, Registration, StageRecord, TrackedRun
from ebbflow.evaluation.gate import REFUSED
from ebbflow.plots import charts
from ebbflow.plots.images import fit, open_rgb
from ebbflow.recipe import Recipe
from ebbflow.storage.disk import write_text
from ebbflow.tracking.pages import page_environment

MAX_PROMPTS = 16
MAX_COLUMNS = 6
"""Evaluations in the image grid; of more, the first, the last ones and the chosen one are shown."""
MAX_CURVES = 8
"""Stages whose curves are drawn; of more, the last ones."""
MAX_SHARP_WIDTH = 96
"""Images up to this width are embedded pixel by pixel, larger ones as small JPEGs."""


@dataclass(frozen=True)
class ReportInputs:
    """Everything that the report shows."""

    recipe: Recipe
    tracked: TrackedRun
    evaluations: Sequence[tuple[Evaluation, Path]]
    """In the order of the run, its start first, each with its samples (Parquet, ``evaluation_schema``). A champion that is not
    the run's own start is one of them, under the label that the decision gives it."""
    stages: Sequence[tuple[StageRecord, Sequence[dict[str, float]]]]
    """Training stages with their metrics: one dictionary per step, with the key ``step`` (``charts.PANELS``: what is drawn)."""
    decision: GateDecision
    registration: Registration | None
    base_seconds: float
    """Seconds spent on the base model; 0 if it was cached."""
    outages: Sequence[str] = ()
    """A sentence per outage or refusal of MLflow (``ebbflow.tracking.outage.deliver_saved``)."""

    def __post_init__(self) -> None:
        labels = [evaluation.label for evaluation, _ in self.evaluations]
        if self.decision.candidate not in labels:
            raise ValueError(f"the decision is about {self.decision.candidate!r}, but the evaluations are {labels}; add that one")

    @property
    def before(self) -> Evaluation:
        return self.evaluations[0][0]

    @property
    def after(self) -> Evaluation:
        return next(evaluation for evaluation, _ in self.evaluations if evaluation.label == self.decision.candidate)

    @property
    def champion(self) -> Evaluation | None:
        """The champion, if it is not this run's own start."""
        others = (evaluation for evaluation, _ in self.evaluations[1:])
        return next((evaluation for evaluation in others if evaluation.label == self.decision.champion), None)

    @property
    def promoted(self) -> bool:
        return self.registration is not None and self.registration.champion

    @property
    def awaits_approval(self) -> bool:
        """Whether the gate approved and a person has yet to: until then the version stays challenger."""
        asked = self.recipe.promotion.approval is not None and self.decision.promote
        return asked and self.registration is not None and not self.promoted


class Cell(NamedTuple):
    """One image of the grid."""

    source: str
    sharp: bool
    exact: bool | None
    """Whether it matches the target exactly; None if that was not measured."""
    score: str


class Row(NamedTuple):
    """One prompt of the grid."""

    prompt: str
    target: str | None
    cells: list[Cell | None]
    """One per shown evaluation; None if it lacks this sample."""


def summary(inputs: ReportInputs) -> dict[str, Any]:
    """The run in numbers, for programs."""
    seconds = {name: round(sum(phases.values()), 3) for name, phases in _times(inputs).items()}
    return {
        "before": _finite(inputs.before.held_out),
        "after": _finite(inputs.after.held_out),
        "seconds": seconds | {"total": round(sum(seconds.values()), 3)},
        "candidate": inputs.decision.candidate,
        "champion": inputs.decision.champion,
        "promoted": inputs.promoted,
        "mlflow_run_id": inputs.tracked.run_id,
        "model_version": inputs.registration.version if inputs.registration else None,
    }


def write_summary(path: Path, inputs: ReportInputs) -> None:
    """Write ``summary`` as JSON."""
    write_text(path, json.dumps(summary(inputs), indent=2, allow_nan=False) + "\n")


def summary_table(inputs: ReportInputs) -> str:
    """Evaluations by metrics, for the terminal; a star marks the candidate."""
    metrics = _metrics(inputs)
    table = [["", *(charts.label(metric) for metric in metrics), "drift"]]
    for evaluation, _ in inputs.evaluations:
        mark = "*" if evaluation is inputs.after else ""
        values = [_number(evaluation.held_out.get(metric)) for metric in metrics]
        table.append([evaluation.label + mark, *values, f"{evaluation.velocity_drift:.2g}"])
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))])
        for row in table
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def write_report(path: Path, inputs: ReportInputs) -> None:
    """Write one HTML file without references to other files or the network."""
    environment = page_environment(Path(__file__).parent)
    environment.globals["refused"] = REFUSED
    environment.filters |= {"number": _number, "label": charts.label, "duration": _duration}
    write_text(path, environment.get_template("report.html").render(_page(inputs)))


def _page(inputs: ReportInputs) -> dict[str, Any]:
    metrics = _metrics(inputs)
    shown = _shown(inputs)
    own_evaluations = [evaluation for evaluation, _ in inputs.evaluations if evaluation is not inputs.champion]
    seconds = _times(inputs)
    return {
        "inputs": inputs,
        "metrics": metrics,
        "guardrails": _guardrails(inputs.recipe),
        "evaluations": [evaluation for evaluation, _ in inputs.evaluations],
        "shown": [evaluation for evaluation, _ in shown],
        "rows": _rows(shown),
        "distributed": _distributed(inputs, metrics),
        "statistics": list(dict.fromkeys(name for evaluation, _ in inputs.evaluations for name in evaluation.statistics)),
        "progress": charts.progress(own_evaluations, metrics, inputs.after.label, inputs.champion),
        "differences": charts.differences(inputs.decision, metrics),
        "curves": [(record, charts.training(steps)) for record, steps in inputs.stages[-MAX_CURVES:]],
        "times": charts.times(seconds),
        "total_seconds": sum(sum(phases.values()) for phases in seconds.values()),
        "recipe_yaml": yaml.safe_dump(inputs.recipe.model_dump(mode="json"), sort_keys=False),
    }


def _guardrails(recipe: Recipe) -> list[str]:
    return [guardrail.column for guardrail in recipe.guardrails]


def _metrics(inputs: ReportInputs) -> list[str]:
    """Metrics to show, in order: the total reward unless it equals the only one, trained rewards, exact match, guardrails."""
    trained = [reward.column for reward in inputs.recipe.rewards]
    combined = [] if len(trained) == 1 and trained[0] in inputs.before.held_out else ["reward"]
    wanted = [*combined, *trained, "exact_match", *_guardrails(inputs.recipe)]
    return [
        metric
        for metric in wanted
        if any(_finite(evaluation.held_out).get(metric) is not None for evaluation, _ in inputs.evaluations)
    ]


def _distributed(inputs: ReportInputs, metrics: Sequence[str]) -> list[tuple[Evaluation, str, Distribution]]:
    """The distribution of every metric, before and after, and of the champion where it is another policy."""
    compared = [inputs.before, *([inputs.champion] if inputs.champion else []), inputs.after]
    return [(each, metric, each.distributions[metric]) for metric in metrics for each in compared if metric in each.distributions]


def _shown(inputs: ReportInputs) -> list[tuple[Evaluation, Path]]:
    evaluations = list(inputs.evaluations)
    if len(evaluations) <= MAX_COLUMNS:
        return evaluations
    kept = {0, *range(len(evaluations) - MAX_COLUMNS + 2, len(evaluations))}
    kept.add(next(index for index, (evaluation, _) in enumerate(evaluations) if evaluation is inputs.after))
    return [evaluations[index] for index in sorted(kept)]


def _times(inputs: ReportInputs) -> dict[str, dict[str, float]]:
    """Seconds by phase of the base model, of every stage, and of all evaluations together."""
    evaluating: dict[str, float] = {}
    for evaluation, _ in inputs.evaluations:
        for phase, seconds in evaluation.seconds.items():
            evaluating[phase] = evaluating.get(phase, 0.0) + seconds
    stages = {record.label: dict(record.seconds) for record, _ in inputs.stages}
    return {"base model": {"base model": inputs.base_seconds}, **stages, "evaluations": evaluating}


def _rows(shown: Sequence[tuple[Evaluation, Path]]) -> list[Row]:
    """The first held-out prompts, not the best ones, with every policy's image from the same noise."""
    samples = [_first_samples(path) for _, path in shown]
    keys = sorted({key for table in samples for key in table})[:MAX_PROMPTS]
    return [_row([table.get(key) for table in samples]) for key in keys]


def _first_samples(path: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """The first held-out samples by key. Reads only what is shown: the images of an evaluation can be gigabytes."""
    held_out = ("split", "==", "held_out")
    keys = pq.read_table(path, columns=["prompt_id", "sample"], filters=[held_out]).sort_by(
        [("prompt_id", "ascending"), ("sample", "ascending")]
    )
    ids = list(dict.fromkeys(keys["prompt_id"].to_pylist()))[:MAX_PROMPTS]
    rows = pq.read_table(path, filters=[held_out, ("prompt_id", "in", ids)]).to_pylist()
    first = {prompt: min(row["sample"] for row in rows if row["prompt_id"] == prompt) for prompt in ids}
    return {(row["prompt_id"], row["sample"]): row for row in rows if row["sample"] == first[row["prompt_id"]]}


def _row(samples: list[dict[str, Any] | None]) -> Row:
    first = next(sample for sample in samples if sample is not None)
    return Row(first["prompt"], first["target"], [_cell(sample) if sample else None for sample in samples])


def _cell(sample: dict[str, Any]) -> Cell:
    image = open_rgb(sample["image"])
    sharp = image.width <= MAX_SHARP_WIDTH
    exact = sample.get("exact_match")
    score = sample.get("ocr", sample.get("reward"))
    return Cell(data_uri(image, sharp), sharp, None if exact is None else exact >= 1, _number(score))


def data_uri(image: Image.Image, sharp: bool) -> str:
    """An image inside a page: pixel by pixel, or as a small JPEG."""
    buffer = io.BytesIO()
    if sharp:
        image.save(buffer, "PNG", optimize=True)
    else:
        fit(image, 1, 2 * MAX_SHARP_WIDTH).save(buffer, "JPEG", quality=80)
    return f"data:image/{'png' if sharp else 'jpeg'};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _finite(values: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in values.items() if math.isfinite(value)}


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"
