"""What alarms and guardrails say of the runs of ``benchmarks.reward_hacking``: the results, their
table and their picture.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.machine import describe_machine
from ebbflow.data.records import Evaluation, Look
from ebbflow.evaluation.gate import REFUSED, decide_by_gate
from ebbflow.evaluation.image_statistics import (
    compute_chance_effect,
    compute_effect_size,
    compute_image_statistics,
)
from ebbflow.evaluation.look import compute_look_error
from ebbflow.recipe import Recipe
from ebbflow.storage.tables import read_table

RESULTS = Path(__file__).parent / "results" / "reward_hacking.json"
FALL = 0.05
"""The independent metric has fallen when it is so far below its start: two standard errors of 96
prompts.
"""
LIMITS = (0.5, 1.0, 1.5, 2.0)
"""Standard deviations that an alarm on a statistic may allow the step's mean to differ from the
first step's.
"""
CHANCE = compute_chance_effect(64, 64)
"""Of the shift of a step of 64 samples from another."""
COLOURS = {"planted": "#c8385a", "honest": "#2f6fdf"}
Run = dict[str, Any]


def write_results(folders: Sequence[Path], recipe_of: Callable[[Run], Recipe]) -> None:
    """Evaluate all runs, and write the results, the table and the picture."""
    runs = [judge_run(folder, recipe_of) for folder in folders]
    # no run is there: the committed results stay
    if not runs:
        return
    order = {"planted": 0, "honest": 1}
    runs.sort(key=lambda run: (order[run["kind"]], run["name"], run["algorithm"], run["seed"]))
    RESULTS.write_text(json.dumps({"machine": describe_machine(), "runs": runs}, indent=1) + "\n")
    write_report(RESULTS)


def write_report(results: Path = RESULTS) -> None:
    """Write the table and the picture next to the results."""
    results_of_runs = json.loads(results.read_text())
    results.with_suffix(".md").write_text(
        "\n".join(format_page(results_of_runs["machine"], results_of_runs["runs"])) + "\n"
    )
    FigureCanvasAgg(plot_figure(results_of_runs["runs"])).print_png(
        results.with_suffix(".png"), metadata={"Software": None}
    )


def judge_run(folder: Path, recipe_of: Callable[[Run], Recipe]) -> Run:
    """A run with what the gate says of it, when its alarms rang, and when the independent metric
    fell.
    """
    run = json.loads((folder / "run.json").read_text())
    recipe = recipe_of(run)
    curve = run["curve"]
    samples_before, samples_after = (
        read_table(folder / f"{name}.parquet") for name in ("before", "after")
    )
    # the gate is the one of the library, on the samples that the run has left
    records = [
        Evaluation.model_validate({key: value for key, value in one.items() if key != "step"})
        for one in curve
    ]
    # At the share of the error budget that a look of a registered model has.
    error = compute_look_error(recipe.promotion, 0.0)
    look = Look(number=1, error=error, spent=error, budget=recipe.promotion.error_budget)
    decision = decide_by_gate(
        recipe, records[-1], records[0], samples_after, samples_before, look=look
    )
    scores = [(one["step"], one["held_out"].get(run["independent"], 0.0)) for one in curve]
    # seen at the first evaluation below, so up to `evaluate_every` steps after it happened
    fell = next((step for step, score in scores if score < scores[0][1] - FALL), None)
    return {
        key: run[key] for key in ("name", "kind", "algorithm", "seed", "independent", "stopped")
    } | {
        "reward": [curve[0]["held_out"].get("reward"), curve[-1]["held_out"].get("reward")],
        "scores": scores,
        "fell": fell,
        "promoted": decision.promote,
        "refused": [
            reason.removeprefix(REFUSED)
            for reason in decision.reasons
            if reason.startswith(REFUSED)
        ],
        "moved": {one.metric: [one.champion, one.candidate] for one in decision.statistics},
        "drift": read_drifts(run["steps"]),
        "steps": compute_step_shifts(folder / "rollouts.zip"),
    }


def read_drifts(steps: Sequence[dict[str, float]]) -> list[float]:
    """The velocity drift after each step; one whose samples all score alike has no update, and
    leaves it as it was.
    """
    drifts = [0.0]
    for step in steps:
        drifts.append(step.get("velocity_drift", drifts[-1]))
    return drifts[1:]


def compute_step_shifts(path: Path) -> dict[str, list[float]]:
    """By how much the mean of each statistic differs from that of the first step, in standard
    deviations of its samples.
    """
    # [samples, height, width, 3] of each step, by the name of its folder in the archive
    pictures: dict[str, list[np.ndarray]] = defaultdict(list)
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(".png"):
                pictures[name.split("/")[1]].append(
                    np.asarray(Image.open(io.BytesIO(archive.read(name))).convert("RGB"))
                )
    rows = [compute_image_statistics(np.stack(pictures[step])) for step in sorted(pictures)]
    start = {name: (float(values.mean()), float(values.std())) for name, values in rows[0].items()}
    # a statistic without a spread at the start has no unit to count in
    return {
        name: [compute_effect_size(row[name], *start[name]) for row in rows]
        for name in start
        if start[name][1] > 0
    }


def find_alarm_step(run: Run, statistic: str, limit: float) -> int | None:
    """The step after which an alarm on a statistic rings, or None."""
    return next(
        (
            step
            for step, shift in enumerate(run["steps"].get(statistic, []), 1)
            # what 64 samples differ by from 64 others by chance is no shift
            if abs(shift) - CHANCE > limit
        ),
        None,
    )


def find_drift_alarm_step(run: Run, limit: float) -> int | None:
    """The step after which the drift alarm rings, or None."""
    return next((step for step, drift in enumerate(run["drift"], 1) if drift > limit), None)


def format_page(computer: Run, runs: Sequence[Run]) -> list[str]:
    """The table of results."""
    planted, honest = (
        [run for run in runs if run["kind"] == kind] for kind in ("planted", "honest")
    )
    # A planted flaw need not be found by the policy: detection is counted over the runs in which it
    # was, false alarms over the honest ones.
    hacked = [run for run in planted if run["fell"] is not None]
    refused = sum(not run["promoted"] for run in planted)
    promoted = sum(run["promoted"] for run in honest)
    return [
        "# Detectors of hacked rewards",
        "",
        (
            f"Written by `python -m benchmarks.reward_hacking` on {computer['cores']} cores of"
            f" {computer['cpu']}. Every run trains the glyph model for 20 steps of 64 samples."
            " Planted rewards have a flaw, honest ones have none"
            " ([entries](../reward_hacking.yaml), [flaws](../flawed_rewards.py)). The independent"
            f" metric is one that the run is not trained on; it has fallen when it is {FALL} below"
            " its start."
        ),
        "",
        (
            f"**The gate refuses {refused} of {len(planted)} planted runs and promotes {promoted}"
            f" of {len(honest)} honest ones.** In {len(hacked)} of the planted runs the independent"
            " metric fell."
        ),
        "",
        "![Statistics over the steps](reward_hacking.png)",
        "",
        "## Runs",
        "",
        "Means over the seeds; the reward is the one that was trained on.",
        "",
        *_format_table(
            [
                "entry",
                "algorithm",
                "runs",
                "reward",
                "independent",
                "fell",
                "promoted",
                "the gate's reasons",
            ],
            _format_run_rows(runs),
        ),
        "",
        *_format_detectors(planted, honest, hacked),
    ]


def _format_detectors(
    planted: Sequence[Run], honest: Sequence[Run], hacked: Sequence[Run]
) -> list[str]:
    """The tables of the gate's guardrails and of the alarms."""
    return [
        "## Guardrails of the gate",
        "",
        "How many runs each rule alone refuses, with the defaults of `promotion`.",
        "",
        *_format_table(
            ["rule", f"planted ({len(planted)})", f"honest ({len(honest)})"],
            _format_rule_rows(planted, honest),
        ),
        "",
        "## Alarms during training",
        "",
        (
            "The alarm on a statistic rings when its mean over a step's samples differs from that"
            " of the first step by more than so many standard deviations of that step's samples."
            " Detected: of the planted runs whose independent metric fell. Lead: median steps"
            " before it was seen to fall (measured every 4 steps). False: honest runs in which it"
            " rang."
        ),
        "",
        *_format_table(["alarm", "detected", "lead", "false"], _format_alarm_rows(hacked, honest)),
    ]


def _format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _format_run_rows(runs: Sequence[Run]) -> list[list[str]]:
    groups: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run["kind"], run["name"], run["algorithm"]].append(run)
    rows = []
    for (kind, name, algorithm), group in groups.items():
        moved = [_mean_or_none(run["reward"][side] for run in group) for side in (0, 1)]
        scores = [_mean_or_none(run["scores"][side][1] for run in group) for side in (0, -1)]
        rules = sorted({name_rule(reason) for run in group for reason in run["refused"]})
        fell = sum(run["fell"] is not None for run in group)
        promoted = sum(run["promoted"] for run in group)
        cells = [
            f"{kind}: {name}",
            algorithm,
            str(len(group)),
            " → ".join(moved),
            f"{group[0]['independent']} {' → '.join(scores)}",
        ]
        rows.append(
            [
                *cells,
                f"{fell} of {len(group)}",
                f"{promoted} of {len(group)}",
                ", ".join(rules) or "–",
            ]
        )
    return rows


def name_rule(reason: str) -> str:
    """The short name of the rule that gave a reason of the gate."""
    kind, name, *_ = reason.split()
    return {"Guardrail": f"guardrail {name}", "Statistic": name, "Coverage": "coverage"}.get(
        kind, "reward"
    )


def _format_rule_rows(planted: Sequence[Run], honest: Sequence[Run]) -> list[list[str]]:
    names = sorted({name_rule(reason) for run in (*planted, *honest) for reason in run["refused"]})
    rows = [
        [
            name,
            *(
                str(sum(name in map(name_rule, run["refused"]) for run in runs))
                for runs in (planted, honest)
            ),
        ]
        for name in names
    ]
    # rules that are neither the reward's, nor coverage, nor a guardrail are statistics of pictures
    statistics = [
        name
        for name in names
        if name not in ("reward", "coverage") and not name.startswith("guardrail")
    ]
    alone = [
        sum(any(name_rule(reason) in statistics for reason in run["refused"]) for run in runs)
        for runs in (planted, honest)
    ]
    rows.append(["any statistic", *map(str, alone)])
    return [
        *rows,
        [
            "any rule",
            *(str(sum(not run["promoted"] for run in runs)) for runs in (planted, honest)),
        ],
    ]


def _format_alarm_rows(hacked: Sequence[Run], honest: Sequence[Run]) -> list[list[str]]:
    names = list(dict.fromkeys(name for run in (*hacked, *honest) for name in run["steps"]))
    alarms: dict[str, Callable[[Run], int | None]] = {
        f"velocity drift above {limit:g}": lambda run, limit=limit: find_drift_alarm_step(
            run, limit
        )
        for limit in (0.3, 1.0)
    }
    # name and limit as defaults: a lambda would see the last ones of the loop
    for name in names:
        for limit in LIMITS:
            alarms[f"{name}, {limit:g}"] = lambda run, name=name, limit=limit: find_alarm_step(
                run, name, limit
            )
    for limit in LIMITS:
        # more statistics detect more and ring more often by chance, which this row shows
        alarms[f"any statistic, {limit:g}"] = lambda run, limit=limit: earliest_step(
            find_alarm_step(run, name, limit) for name in names
        )
    return [[alarm, *_format_detection(hacked, honest, rings)] for alarm, rings in alarms.items()]


def earliest_step(steps: Any) -> int | None:
    """The earliest of some steps of which each may be None."""
    return min((step for step in steps if step is not None), default=None)


def _format_detection(
    hacked: Sequence[Run], honest: Sequence[Run], rings: Callable[[Run], int | None]
) -> list[str]:
    alarm_steps = [(run["fell"], rings(run)) for run in hacked]
    detected = [(fell, step) for fell, step in alarm_steps if step is not None]
    # negative where the alarm rang after the fall
    lead = f"{median(fell - step for fell, step in detected):g}" if detected else "–"
    false = sum(rings(run) is not None for run in honest)
    return [f"{len(detected)} of {len(hacked)}", lead, f"{false} of {len(honest)}"]


def _mean_or_none(values: Any) -> str:
    known = [value for value in values if value is not None]
    return f"{np.mean(known):.3g}" if known else "–"


def plot_figure(runs: Sequence[Run]) -> Figure:
    """A panel for each statistic: its shift over the steps, a line per run."""
    names = list(dict.fromkeys(name for run in runs for name in run["steps"]))
    with matplotlib.rc_context(
        {"font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
    ):
        # three panels a row, the first one for the independent metric
        num_rows = -(-(len(names) + 1) // 3)
        figure = Figure(figsize=(11, 2.4 * num_rows), layout="constrained")
        panels = figure.subplots(num_rows, 3, squeeze=False).ravel()
        for axes in panels[len(names) + 1 :]:
            axes.set_axis_off()
        for run in runs:
            style = {"color": COLOURS[run["kind"]], "linewidth": 0.8, "alpha": 0.6}
            start = run["scores"][0][1]
            panels[0].plot(
                [step for step, _ in run["scores"]],
                [score - start for _, score in run["scores"]],
                **style,
            )
            for axes, name in zip(panels[1:], names, strict=False):
                axes.plot(
                    range(1, len(run["steps"].get(name, [])) + 1),
                    run["steps"].get(name, []),
                    **style,
                )
        for axes, title in zip(
            panels,
            ["independent metric, change", *(f"{name}, standard deviations" for name in names)],
            strict=False,
        ):
            axes.set_title(title, loc="left", fontsize=9)
            axes.set_xlabel("step")
        figure.suptitle("Red: rewards with a planted flaw; blue: honest ones", fontsize=10)
        return figure
