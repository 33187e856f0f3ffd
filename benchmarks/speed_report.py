"""The page of ``benchmarks.speed``: its own ratios, and those that other benchmarks have left in
their results.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import diffusers
import torch

from benchmarks.algorithms_report import GOAL, interpolate_seconds
from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results"
NOTES = (
    "An update is the mean of four, of which one measures the drift. Where a ratio is above what is"
    " wanted: noise, guidance, the sampler's step, log-probs and metrics take less than a"
    " millisecond a step, which only a network of milliseconds feels; the wide one does not. Steps"
    " of RWR have rollouts without a ratio, whose adapters may be merged; steps of flow_grpo have"
    " one, and their updates may reuse the rollout's forward passes: no step can have both. What"
    " reused passes save is a share of the training, so it grows with the trained steps."
)
# What this page compares, so the names must be those of algorithms.yaml.
QUICK = "diffusion_nft_quick"
ALL_STEPS = "flow_grpo_longer"
"""Entries of ``benchmarks.algorithms``: the best recipe, and Flow-GRPO on all steps, given as long
as it needs.
"""

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A row of the table: the ratio of the CPU-seconds of two calls that do the same work.

    Example:
        ::

            Case("rollouts ÷ bare forwards: glyph", "≤ 1.05", run_ours, run_bare)

    Attributes:
        wanted: what the ratio should be.
    """

    name: str
    wanted: str
    call: Call
    other: Call


@dataclass(frozen=True)
class MedianTimes:
    """Medians over the turns: of the ratio, and of the CPU-seconds of both calls."""

    ratio: float
    seconds: float
    other_seconds: float


def format_report(times_by_case: Mapping[Case, MedianTimes], repeat: int) -> str:
    """The page of the results."""
    command = shlex.join(["python", "-m", "benchmarks.speed", *sys.argv[1:]])
    on = describe_machine()
    versions = f"torch {torch.__version__}, diffusers {diffusers.__version__}"
    lines = [
        "# Speed against bare torch",
        "",
        (
            f"Written by `{command}`: medians over {repeat} turns of both sides in one process, in"
            f" CPU-seconds of one thread on {on['cpu']}, {versions}. The bare side has nothing but"
            " the network, a squared error and the same fused AdamW."
        ),
        "",
    ]
    lines += format_rows(times_by_case)
    lines += ["", NOTES, "", "What other benchmarks have measured, from their results:", ""]
    lines += ["| measure | found | wanted | command |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(cells)} |" for cells in list_other_measures()]
    return "\n".join(lines) + "\n"


def format_rows(times_by_case: Mapping[Case, MedianTimes]) -> list[str]:
    """Format the table of some cases."""
    lines = ["| measure | ratio | wanted | CPU-s | CPU-s of the other |", "|---|---|---|---|---|"]
    for case, measured in times_by_case.items():
        seconds = f"{measured.seconds:.4f} | {measured.other_seconds:.4f}"
        lines.append(f"| {case.name} | {measured.ratio:.3f} | {case.wanted or '–'} | {seconds} |")
    return lines


def replace_part(page: str, part: str) -> str:
    """Return a page with this part instead of the one with the same heading, or at its end.

    A part begins with its heading; that of the page itself is all before the first of the others.
    """
    parts = {text.partition("\n")[0]: text for text in re.split(r"(?m)^(?=##? )", page) if text}
    parts[part.partition("\n")[0]] = part
    return "\n\n".join(text.strip() for text in parts.values()) + "\n"


def list_other_measures(results: Path = RESULTS) -> list[tuple[str, str, str, str]]:
    """List rows of (measure, found, wanted, command).

    They are read from the committed results of the other benchmarks, which take hours.
    """
    names = ("algorithms", "glyph_seeds", "scale")
    learning, demo, scale = (json.loads((results / f"{name}.json").read_text()) for name in names)
    runs = _select_comparable_runs(learning["runs"])
    quick, steps = (_median_seconds_to_goal(runs, name) for name in (QUICK, ALL_STEPS))
    # how much of a run's wall time is spent between its nodes
    walls = [run["wall_seconds"] / run["node_seconds"] for run in demo["runs"].values()]
    exact, rounded = (scale[f"now latents {precision}"] for precision in ("float32", "bfloat16"))
    read = [f"{row['read ms']:.2f} ms, {row['KiB']:.0f} KiB" for row in (rounded, exact)]
    algorithms = "`python -m benchmarks.algorithms`"
    scaled = "`python -m benchmarks.scale`"
    return [
        (
            f"CPU-s to held-out {GOAL:.2f}: {QUICK} ÷ {ALL_STEPS}",
            f"{quick / steps:.2f} ({quick:.1f} ÷ {steps:.1f})",
            "≤ .20",
            algorithms,
        ),
        (
            "demo: wall ÷ seconds in nodes",
            f"{median(walls):.2f}",
            "≤ 1.05",
            "`python -m benchmarks.glyph_seeds`",
        ),
        (
            "peak memory of an offline epoch ÷ one shard",
            f"{exact['epoch, shards']:.1f}",
            "≤ 2",
            scaled,
        ),
        ("reading a latent of SD3.5 at 512 x 512, bfloat16", read[0], "≤ .4 ms, ≤ 100 KiB", scaled),
        ("the same in float32, which is exact", read[1], "–", scaled),
    ]


def _select_comparable_runs(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Select the runs of one processor on which both entries were measured, as CPU-seconds of two
    are not comparable; of several such processors the last of the file.
    """
    cpus_of_entries = [
        {run["cpu"] for run in runs if run["name"] == name} for name in (QUICK, ALL_STEPS)
    ]
    shared = set.intersection(*cpus_of_entries)
    cpus = [run["cpu"] for run in runs if run["cpu"] in shared]
    return [run for run in runs if run["cpu"] == cpus[-1]]


def _median_seconds_to_goal(runs: list[dict[str, Any]], name: str) -> float:
    """Median over the seeds of an entry; a run that never reached it took infinitely many."""
    reached = [interpolate_seconds(run["curve"], GOAL) for run in runs if run["name"] == name]
    return median(math.inf if seconds is None else seconds for seconds in reached)
