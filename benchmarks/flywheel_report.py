"""The table and the picture of ``benchmarks.flywheel``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ebbflow.plots.svg import SERIES

CONFIDENCE = 0.9
"""Of the reward models' intervals, and of their gate; a recipe's default is .95."""
ARMS = {
    "flywheel": "the reward model that the gate has left each turn",
    "first_model": "the reward model of the first turn",
    "jpeg": "the size of the JPEG file",
}


def write_report(path: Path) -> None:
    """Write the page and the picture next to the results."""
    results = json.loads(path.read_text())
    path.with_suffix(".md").write_text("\n".join(format_page(results)) + "\n")
    FigureCanvasAgg(plot_scores([run for run in results["runs"] if run["arms"]])).print_png(
        path.with_suffix(".png"), metadata={"Software": None}
    )


def format_page(results: dict[str, Any]) -> list[str]:
    """The lines of the page."""
    runs = [run for run in results["runs"] if run["arms"]]
    stopped = [run for run in results["runs"] if not run["arms"]]
    settings = results["settings"]
    rises = [rises_each_turn(run["arms"]["flywheel"]) for run in runs]
    hacked = [is_hacked_after_first_turn(run["arms"]["jpeg"]) for run in runs]
    kept = [has_same_rewards(run) for run in runs]
    gaps = [
        run["arms"]["flywheel"][-1]["true"] - run["arms"]["first_model"][-1]["true"] for run in runs
    ]
    return [
        "# Three turns of the circle",
        "",
        "Written by `python -m benchmarks.flywheel` on"
        f" {results['machine']['cores']} cores of {results['machine']['cpu']}. Each turn has"
        f" {settings['pairs']} pairs labelled by a stand-in whose taste is the OCR score and who"
        f" prefers the worse picture in {settings['error_rate']:.0%} of them, and"
        f" {settings['steps']} training steps of 64 samples. The true score is the OCR score of"
        " two samples of each of 96 held-out prompts,"
        " with the same noise at every evaluation.",
        "",
        f"**The true score rises in each turn in {sum(rises)} of {len(results['runs'])}"
        f" seeds.** {describe_stopped(stopped)}On the size"
        " of the JPEG file it is lower after the last turn than after the first one, although the"
        f" size that is trained on has improved, in {sum(hacked)} of {len(runs)}.",
        "",
        "What this does not show: that a new reward model each turn helps. The reader begins as one"
        " that was trained on rendered letters, and more labels made it agree with held-out answers"
        f" measurably more often in {len(runs) - sum(kept)} of {len(runs)} seeds. Where they did"
        " not, the gate kept the first reward model, and the policy that trained on it to the end"
        f" has a true score that differs by {min(gaps):+.3f} to {max(gaps):+.3f}.",
        "",
        "Nor that the JPEG file is a bad reward for so few steps: its first turn raises the true"
        " score more than the reward model does in any seed"
        f" ({format_last_scores(runs, 'jpeg')} after the last turn, with the reward model"
        f" {format_last_scores(runs, 'flywheel')}). No interval is computed for these scores.",
        "",
        "![True score over the turns](flywheel.png)",
        "",
        "## True score",
        "",
        "| trained on | seed | before | " + " | ".join(f"turn {turn}" for turn in (1, 2, 3)) + " |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {text} | {run['seed']} | "
            + " | ".join(f"{scores['true']:.3f}" for scores in run["arms"][arm])
            + " |"
            for arm, text in ARMS.items()
            for run in runs
        ),
        "",
        "## Reward that is trained on",
        "",
        "| trained on | seed | turn 1 | turn 2 | turn 3 |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {text} | {run['seed']} | "
            + " | ".join(f"{scores['trained']:.4g}" for scores in run["arms"][arm][1:])
            + " |"
            for arm, text in ARMS.items()
            for run in runs
        ),
        "",
        "## Reward models",
        "",
        "Agreement with held-out answers, of which the stand-in gets"
        f" {settings['error_rate']:.0%} wrong. The intervals, and the gate's, have a confidence of"
        f" {CONFIDENCE:.0%}, and not the default of 95%.",
        "",
        "| seed | turn | answers | agreement | interval | calibration error | promoted |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(
            format_reward_model(run["seed"], turn, record)
            for run in results["runs"]
            for turn, record in enumerate(run["reward_models"], start=1)
        ),
        "",
        "A seed that was trained to the end took"
        f" {np.mean([run['cpu_seconds'] for run in runs]):.0f} CPU-seconds on average.",
    ]


def rises_each_turn(scores: Sequence[dict[str, float]]) -> bool:
    """Whether the true score is higher after each turn than before it."""
    return all(later["true"] > earlier["true"] for earlier, later in pairwise(scores))


def is_hacked_after_first_turn(scores: Sequence[dict[str, float]]) -> bool:
    """Whether the true score fell from the first turn to the last one while the reward rose."""
    first, last = scores[1], scores[-1]
    return last["true"] < first["true"] and last["trained"] > first["trained"]


def format_last_scores(runs: Sequence[dict[str, Any]], arm: str) -> str:
    """The true scores after the last turn, by seed."""
    return ", ".join(f"{run['arms'][arm][-1]['true']:.3f}" for run in runs)


def describe_stopped(runs: Sequence[dict[str, Any]]) -> str:
    """A sentence about the seeds whose first reward model was refused; empty without any."""
    if not runs:
        return ""
    seeds = ", ".join(str(run["seed"]) for run in runs)
    return (
        f"In seed {seeds} the gate refused the first reward model, and no policy was trained: too"
        " few held-out answers show that it is better than chance. "
    )


def has_same_rewards(run: dict[str, Any]) -> bool:
    """Whether no reward model after the first one was promoted."""
    return not any(record["decision"]["promote"] for record in run["reward_models"][1:])


def format_reward_model(seed: int, turn: int, record: dict[str, Any]) -> str:
    """A row of the table of reward models."""
    measurement = record["measurement"]
    agreement = measurement["agreement"]
    return (
        f"| {seed} | {turn} | {record['answers']} | {agreement['mean']:.3f} |"
        f" {agreement['low']:.3f} to {agreement['high']:.3f} |"
        f" {measurement['calibration_error']:.3f} |"
        f" {'yes' if record['decision']['promote'] else 'no'} |"
    )


def plot_scores(runs: Sequence[dict[str, Any]]) -> Figure:
    """The true score over the turns: a thin line for each seed, a thick one for their mean."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    for (arm, text), colour in zip(ARMS.items(), SERIES, strict=False):
        curves = np.array([[scores["true"] for scores in run["arms"][arm]] for run in runs])
        turns = range(curves.shape[1])
        for curve in curves:
            axes.plot(turns, curve, color=colour, linewidth=0.8, alpha=0.5)
        axes.plot(turns, curves.mean(axis=0), color=colour, linewidth=2.2, label=text)
    axes.set_xticks(range(4), ["before", "turn 1", "turn 2", "turn 3"])
    axes.set_ylabel("true score (OCR, held out)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure
