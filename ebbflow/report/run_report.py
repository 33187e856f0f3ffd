"""The report of a run: one self-contained HTML page, summary.json, and a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ebbflow.data.records import (
    Distribution,
    Evaluation,
    GateDecision,
    Registration,
    StageRecord,
    TrackedRun,
)
from ebbflow.formatting import format_number
from ebbflow.plots import charts
from ebbflow.recipe import Recipe
from ebbflow.recipe.families import find_family
from ebbflow.registry.serving import how_to_load
from ebbflow.report.categories import build_category_tables, keep_finite, summarise_categories
from ebbflow.report.costs import Ledger
from ebbflow.report.glossary import build_glossary
from ebbflow.report.page_environment import create_result_environment
from ebbflow.report.run_facts import RunFacts
from ebbflow.report.sides import (
    build_pictures,
    compare_by_prompt,
    list_metrics,
    name_trained_reward,
)
from ebbflow.run_summary import write_summary_file
from ebbflow.storage.disk import write_text

MAX_COLUMNS = 6
"""Evaluations in the image grid; of more, the first, the last ones and the chosen one are shown."""
MAX_CURVES = 8
"""Stages whose curves are drawn; of more, the last ones."""


@dataclass(frozen=True)
class ReportInputs:
    """Everything that the report shows.

    Example::

        ReportInputs(
            recipe,
            tracked_run,
            evaluations=[(before, Path("before.parquet")), (after, Path("after.parquet"))],
            stages=[(record, [{"step": 0, "reward/mean": 0.51}, {"step": 1, "reward/mean": 0.53}])],
            decision=decision,
            registration=None,
            base_seconds=61.0,
        )
    """

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
    ledger: Ledger | None = None
    """What the run costs (``ebbflow.report.costs``)."""
    policy: str | None = None
    """Path or URI of the candidate's policy folder."""
    base: str | None = None
    """Path or URI of the run's base-model folder."""

    def __post_init__(self) -> None:
        # Every property below looks the candidate up, deep inside a template otherwise.
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
        if not asked or self.registration is None:
            return False
        return not self.promoted and not self.registration.declined


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
    """Summarise the run in numbers, for programs. ``seconds`` are on the clock; ``total`` is that
    of the parts, ``run`` of everything.

    Example::

        {
            "before": {"reward": 0.53, "ocr": 0.53},
            "after": {"reward": 0.98, "ocr": 0.98},
            "seconds": {"base model": 61.0, "1.1 online": 40.2, "total": 140.9, "run": 155.3},
            "promoted": True,
            ...
        }
    """
    seconds = {name: round(times.seconds, 3) for name, times in _measure_times(inputs).items()}
    # The parts run side by side where there are branches, so their sum is not the run's time.
    seconds["total"] = round(sum(seconds.values()), 3)
    if inputs.facts:
        seconds["run"] = round(inputs.facts.written_at - inputs.tracked.started_at, 3)
    summary = {
        "before": keep_finite(inputs.first_evaluation.held_out),
        "after": keep_finite(inputs.candidate_evaluation.held_out),
        "seconds": seconds,
        "candidate": inputs.decision.candidate,
        "champion": inputs.decision.champion,
        "promoted": inputs.promoted,
        "mlflow_run_id": inputs.tracked.run_id,
        "model_version": inputs.registration.version if inputs.registration else None,
        "policy": inputs.policy,
        "base": inputs.base,
        "load": _how_to_load(inputs),
    }
    categories = summarise_categories(inputs.first_evaluation, inputs.candidate_evaluation)
    if inputs.ledger:
        summary["cost"] = inputs.ledger.summarise()
    # Most prompt files have no categories, and a program asks whether the key is there.
    if categories:
        summary["categories"] = categories
    return summary


def write_summary(path: Path, inputs: ReportInputs) -> None:
    """Write ``summarise_run`` as JSON."""
    write_summary_file(path, summarise_run(inputs))


def format_summary_table(inputs: ReportInputs) -> str:
    """Format a table of evaluations by metrics, for the terminal; a star marks the candidate."""
    metrics = list_metrics(inputs.recipe, [evaluation for evaluation, _ in inputs.evaluations])
    table = [["", *(charts.format_metric_name(metric) for metric in metrics), "drift"]]
    for evaluation, _ in inputs.evaluations:
        mark = "*" if evaluation is inputs.candidate_evaluation else ""
        values = [format_number(evaluation.held_out.get(metric)) for metric in metrics]
        table.append([evaluation.label + mark, *values, f"{evaluation.velocity_drift:.2g}"])
    # Names are flush left, numbers flush right.
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
    template = create_result_environment().get_template("report.html")
    write_text(path, template.render(_build_page(inputs)))


def _build_page(inputs: ReportInputs) -> dict[str, Any]:
    metrics = list_metrics(inputs.recipe, [evaluation for evaluation, _ in inputs.evaluations])
    pictured = _select_evaluations(inputs)
    against, after = _find_compared_sides(inputs)
    # The champion is a dashed line of the charts, and no point of this run's progress.
    run_evaluations = [
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
        "guardrails": [guardrail.column for guardrail in inputs.recipe.guardrails],
        **build_glossary(inputs.recipe, [*metrics, inputs.decision.target.metric], statistics),
        "trained": name_trained_reward(inputs.recipe),
        "evaluations": [evaluation for evaluation, _ in inputs.evaluations],
        "shown": [evaluation for evaluation, _ in pictured],
        "distributed": _list_distributions(inputs, metrics),
        "categories": build_category_tables(against[0], inputs.candidate_evaluation),
        "statistics": statistics,
        "progress": charts.plot_progress(
            run_evaluations, metrics, inputs.candidate_evaluation.label, inputs.champion
        ),
        "differences": charts.plot_differences(inputs.decision),
        # A long run has hundreds of stages; the last ones show where it was heading.
        "curves": [
            (record, charts.plot_training(steps)) for record, steps in inputs.stages[-MAX_CURVES:]
        ],
        "times": _measure_times(inputs),
        "recipe_yaml": yaml.safe_dump(inputs.recipe.model_dump(mode="json"), sort_keys=False),
        "problems": _list_problems(inputs),
        "how_to_load": _how_to_load(inputs),
        **build_pictures(pictured, against, after, metrics),
        **compare_by_prompt(inputs.recipe, against, after),
    }


def _find_compared_sides(
    inputs: ReportInputs,
) -> tuple[tuple[Evaluation, Path], tuple[Evaluation, Path]]:
    """Find what the gate compared: the champion, or the run's start, and the candidate."""
    # Reversed, so that of two evaluations with one label the first counts, as in the properties.
    pairs = {
        evaluation.label: (evaluation, path) for evaluation, path in reversed(inputs.evaluations)
    }
    # Where the run started from the champion, its first evaluation is the champion's.
    against = inputs.champion or inputs.first_evaluation
    return pairs[against.label], pairs[inputs.candidate_evaluation.label]


def _list_problems(inputs: ReportInputs) -> list[str]:
    """List what a person should know before anything else."""
    # They stand at the top of the page: an alarm makes the numbers below it doubtful.
    alarms = [f"{record.label}: {alarm}" for record, _ in inputs.stages for alarm in record.alarms]
    model = inputs.recipe.model
    family = find_family(model.family)
    caveats = (
        [f"model.family = {model.family}: {family.caveat}"] if family and family.caveat else []
    )
    return [*alarms, *inputs.outages, *caveats]


def _how_to_load(inputs: ReportInputs) -> str | None:
    """Write the Python that loads the registered version, if there is one."""
    if inputs.registration is None:
        return None
    return how_to_load(
        inputs.tracked.tracking_uri, inputs.registration.model_name, inputs.registration.version
    )


def _list_distributions(
    inputs: ReportInputs, metrics: Sequence[str]
) -> list[tuple[Evaluation, str, Distribution]]:
    """List the distribution of every metric, before and after, and of the champion where it is
    another policy.
    """
    compared = [inputs.first_evaluation, inputs.candidate_evaluation]
    if inputs.champion:
        compared.insert(1, inputs.champion)
    return [
        (evaluation, metric, evaluation.distributions[metric])
        for metric in metrics
        for evaluation in compared
        if metric in evaluation.distributions
    ]


def _select_evaluations(inputs: ReportInputs) -> list[tuple[Evaluation, Path]]:
    """Select the evaluations with a column of pictures: the first, the candidate, the last ones."""
    evaluations = list(inputs.evaluations)
    count = len(evaluations)
    if count <= MAX_COLUMNS:
        return evaluations
    # Two columns are for the first and the candidate, which is often among the last ones.
    last = range(count - MAX_COLUMNS + 2, count)
    return [
        (evaluation, path)
        for index, (evaluation, path) in enumerate(evaluations)
        if index == 0 or index in last or evaluation is inputs.candidate_evaluation
    ]


def _measure_times(inputs: ReportInputs) -> dict[str, Times]:
    """Measure the times of the base model, of every stage, and of all evaluations together."""
    evaluations: dict[str, float] = {}
    for evaluation, _ in inputs.evaluations:
        for phase, seconds in evaluation.seconds.items():
            evaluations[phase] = evaluations.get(phase, 0.0) + seconds
    stages = {record.label: dict(record.seconds) for record, _ in inputs.stages}
    parts = {"base model": {"base model": inputs.base_seconds}, **stages}
    parts["evaluations"] = evaluations
    return {
        name: Times(_measure_wall_seconds(inputs, name), phases) for name, phases in parts.items()
    }


def _measure_wall_seconds(inputs: ReportInputs, part: str) -> float | None:
    """Measure the seconds on the clock of the nodes of a part of the run; None where none of them
    is known.
    """
    if inputs.facts is None:
        return None
    evaluations = {name for name in inputs.facts.nodes if name.endswith(" evaluation")}
    if part == "evaluations":
        names = evaluations
    else:
        # A stage has several nodes, such as "1.2 offline" and "1.2 offline advantages".
        names = {
            name for name in inputs.facts.nodes if name == part or name.startswith(f"{part} ")
        } - evaluations
    return inputs.facts.measure_wall_seconds(names) if names else None
