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

ARMS = {
    "flywheel": "the reward model that the gate has left each turn",
    "first_model": "the reward model of the first turn",
    "jpeg": "the size of the JPEG file, in one stage",
}


def write_report(path: Path) -> None:
    """Write the page and the picture next to the results."""
    results = json.loads(path.read_text())
    path.with_suffix(".md").write_text("\n".join(format_page(results)) + "\n")
    picture = path.with_suffix(".png")
    runs = list_trained_runs(results)
    if not runs:
        # The page has no picture then, and one of earlier results would belong to none.
        picture.unlink(missing_ok=True)
        return
    canvas = FigureCanvasAgg(plot_scores(runs))
    canvas.print_png(picture, metadata={"Software": None})


def list_trained_runs(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs whose first reward model passed its gate, so that policies were trained."""
    return [run for run in results["runs"] if run["arms"]]


def format_page(results: dict[str, Any]) -> list[str]:
    """The lines of the page."""
    runs = list_trained_runs(results)
    head = ["# Three turns of the circle", "", *describe_setting(results), ""]
    if not runs:
        stopped = describe_stopped(results["runs"]).strip()
        return [*head, stopped, "", *format_reward_models(results)]
    return [
        *head,
        *describe_outcome(results["runs"], runs),
        "![True score over the turns](flywheel.png)",
        "",
        *format_score_tables(runs),
        "",
        *format_reward_models(results),
        *describe_cost(runs),
    ]


def describe_cost(runs: Sequence[dict[str, Any]]) -> list[str]:
    """What a seed took, of those that ran without interruption."""
    seconds = [run["cpu_seconds"] for run in runs if run["cpu_seconds"] is not None]
    if not seconds:
        return []
    return ["", f"A seed that ran without interruption took {np.mean(seconds):.0f} CPU-seconds."]


def describe_setting(results: dict[str, Any]) -> list[str]:
    """What was run, in sentences."""
    settings = results["settings"]
    return [
        "Written by `python -m benchmarks.flywheel` on"
        f" {results['machine']['cores']} cores of {results['machine']['cpu']}. The base model is"
        f" fine-tuned on {settings['pictures']} captioned pictures, which anchor all later"
        f" training. Each turn has {settings['pairs']} pairs labelled by a stand-in whose taste is"
        f" the OCR score and who prefers the worse picture in {settings['error_rate']:.0%} of them,"
        f" and {settings['steps']} training steps of 64 samples, on prompts and noise of its own as"
        " with `ebbflow turn`. The true score is the OCR score of"
        " two samples of each of 96 held-out prompts, with the same noise at every evaluation. No"
        " interval is computed for it.",
    ]


def describe_outcome(
    all_runs: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]
) -> list[str]:
    """What came out, by the criteria that are stated here."""
    stopped = [run for run in all_runs if not run["arms"]]
    rises = [rises_each_turn(run["arms"]["flywheel"]) for run in runs]
    hacked = [is_hacked(run["arms"]["jpeg"]) for run in runs]
    gaps = [
        run["arms"]["first_model"][-1]["true"] - run["arms"]["flywheel"][-1]["true"] for run in runs
    ]
    flat = [run["seed"] for run in runs if not reward_rises_at_the_end(run["arms"]["flywheel"])]
    later = [
        record["decision"]["difference"] for run in runs for record in run["reward_models"][1:]
    ]
    replaced = [
        sum(record["decision"]["promote"] for record in run["reward_models"][1:]) for run in runs
    ]
    return [
        f"**The true score rises in each turn in {sum(rises)} of {len(all_runs)}"
        f" seeds.** {describe_stopped(stopped)}On the size of the JPEG file, which never changes,"
        " it ends below that of the fine-tuned model, although the size improves in each turn, in"
        f" {sum(hacked)} of {len(runs)}: {format_last_scores(runs, 'jpeg')} from"
        f" {format_first_scores(runs)}; with the circle {format_last_scores(runs, 'flywheel')}.",
        "",
        f"A later reward model replaced the first one {sum(replaced)} times in"
        f" {len(runs) * (len(runs[0]['reward_models']) - 1)}. Trained on two and three times as"
        " many answers, they agree about as often as the champion with the same held-out answers"
        f" ({format_range(later)}, {np.mean(later):+.3f} on average): their gain is too small to"
        " see, or there is none. The reader begins as one that was trained on rendered"
        " letters. The true score of policies that train to the end on the first"
        f" reward model differs from the circle's by {format_range(gaps)}"
        f"{'' if any(gaps) else ', as they are the same policies'}.",
        "",
        *describe_flat_rewards(flat),
    ]


def reward_rises_at_the_end(scores: Sequence[dict[str, float]]) -> bool:
    """Whether the reward that is trained on rose in the last turn."""
    return scores[-1]["trained"] > scores[-2]["trained"]


def describe_flat_rewards(seeds: Sequence[int]) -> list[str]:
    """A sentence about the seeds where the last turn did not raise its own reward."""
    if not seeds:
        return []
    return [
        f"In seed {', '.join(map(str, seeds))} the last turn did not raise the reward that it"
        " trains on either.",
        "",
    ]


def format_range(values: Sequence[float]) -> str:
    """The lowest and the highest of some numbers, with their signs."""
    return f"{min(values):+.3f} to {max(values):+.3f}"


def format_score_tables(runs: Sequence[dict[str, Any]]) -> list[str]:
    """The tables of the true score and of the reward that is trained on."""
    turns = " | ".join(f"turn {turn}" for turn in (1, 2, 3))
    rows = [(text, arm, run) for arm, text in ARMS.items() for run in runs]
    return [
        "## True score",
        "",
        f"| trained on | seed | base model | fine-tuned | {turns} |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {text} | {run['seed']} | {run['base']['true']:.3f} | "
            + " | ".join(f"{scores['true']:.3f}" for scores in run["arms"][arm])
            + " |"
            for text, arm, run in rows
        ),
        "",
        "## Reward that is trained on",
        "",
        f"| trained on | seed | {turns} |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {text} | {run['seed']} | "
            + " | ".join(f"{scores['trained']:.4g}" for scores in run["arms"][arm][1:])
            + " |"
            for text, arm, run in rows
        ),
    ]


def format_reward_models(results: dict[str, Any]) -> list[str]:
    """The table of the reward models."""
    return [
        "## Reward models",
        "",
        "Agreement with held-out answers, of which the stand-in gets"
        f" {results['settings']['error_rate']:.0%} wrong. The intervals, and the gate's, have a"
        " confidence of 95%. The champion's agreement is measured on the same answers; in turn 1 it"
        " is chance, one half.",
        "",
        "| seed | turn | answers | agreement | interval | minus the champion's | interval |"
        " calibration error | promoted |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(
            format_reward_model(run["seed"], turn, record)
            for run in results["runs"]
            for turn, record in enumerate(run["reward_models"], start=1)
        ),
    ]


def rises_each_turn(scores: Sequence[dict[str, float]]) -> bool:
    """Whether the true score is higher after each turn than before it."""
    return all(later["true"] > earlier["true"] for earlier, later in pairwise(scores))


def is_hacked(scores: Sequence[dict[str, float]]) -> bool:
    """Whether the true score is lower after the last turn than before the first one, and the reward
    that is trained on rose from each turn to the next.
    """
    rewards = [turn["trained"] for turn in scores[1:]]
    return scores[-1]["true"] < scores[0]["true"] and rewards == sorted(rewards)


def format_first_scores(runs: Sequence[dict[str, Any]]) -> str:
    """The true scores before the first turn, by seed."""
    return ", ".join(f"{run['arms']['flywheel'][0]['true']:.3f}" for run in runs)


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


def format_reward_model(seed: int, turn: int, record: dict[str, Any]) -> str:
    """A row of the table of reward models."""
    measurement = record["measurement"]
    agreement = measurement["agreement"]
    decision = record["decision"]
    # The first one is compared with chance, one half.
    difference = (
        f"{decision['difference']:+.3f} | {decision['low']:+.3f} to {decision['high']:+.3f}"
    )
    return (
        f"| {seed} | {turn} | {record['answers']} | {agreement['mean']:.3f} |"
        f" {agreement['low']:.3f} to {agreement['high']:.3f} | {difference} |"
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
        # Without a second promotion these policies are those of the circle, and lie on them.
        style = "--" if arm == "first_model" else "-"
        mean = curves.mean(axis=0)
        axes.plot(turns, mean, color=colour, linewidth=2.2, linestyle=style, label=text)
    axes.set_xticks(range(4), ["fine-tuned", "turn 1", "turn 2", "turn 3"])
    axes.set_ylabel("true score (OCR, held out)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure
