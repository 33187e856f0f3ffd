"""The modes of an online stage on the glyph task: ``python -m benchmarks.online_modes [--seeds 0 1
2] [--steps 40]``.

``measure_speed``: training on one core and rollouts with their rewards on another, as Ray workers
that are pinned there; the time of a step in every mode, against what its parts take when nothing
overlaps. ``measure_learning``: the same number of steps in every mode from the same base model,
with several seeds, and the held-out OCR score at the end. Results go to
``benchmarks/results/online_modes.json``, the tables to ``online_modes.md`` and the timelines to
``online_modes.png`` beside it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from PIL import Image
from tqdm import tqdm

from benchmarks.algorithms import prepare_inputs, score_policy
from benchmarks.machine import describe_machine
from ebbflow.data.prompts import read_prompts
from ebbflow.online.loop import run_online_stage
from ebbflow.online.workers import open_local_workers
from ebbflow.recipe import Recipe
from ebbflow.rewards.combine import load_scorer
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training.policy_io import open_model, open_policy
from ebbflow.training.update import PolicyUpdater

RESULTS = Path(__file__).parent / "results" / "online_modes.json"
MODES = {"sync": {}, "one_step_off": {}, "async": {"staleness": 2}}
# As in workflows/recipes/glyph_lora.yaml, which says why a small model needs these instead of the
# published ones.
SMALL: dict[str, Any] = {
    "sampler": {"steps": 6},
    "optimizer": {"lr": 3e-4, "weight_decay": 0.0},
    "updates_per_step": 2,
}
MIX_GRPO: dict[str, Any] = SMALL | {
    "algorithm": {"name": "mix_grpo", "clip_range": 1e-3},
    "window": {"size": 3, "limit": 0.5, "steps_per_window": 10},
    "advantages": {"std": "global"},
    "reference": {"weight": 0.02},
}
FLOW_GRPO: dict[str, Any] = SMALL | {
    "algorithm": {"name": "flow_grpo", "clip_range": 1e-3},
    "reference": {"weight": 0.02, "penalty": "kl"},
}
# One that trains some steps of a rollout and one that trains all: what overlapping gains depends
# on how long rollouts and training take.
WORKLOADS = {"mix_grpo, as in the demo": MIX_GRPO, "flow_grpo, every step trained": FLOW_GRPO}
LEARNING = {"mix_grpo": MIX_GRPO | {"optimizer": {"lr": 1.5e-4, "weight_decay": 0.0}}}
SPEED_STEPS = 10
WARM_UP = 2
"""Steps of a measured stage, and those at its beginning that are left out: workers still load and
allocate.
"""


@dataclass
class FileRecorder(MetricsRecorder):
    """A recorder that keeps files, too."""

    keeps_files = True
    files: dict[str, bytes] = field(default_factory=dict)

    def log_file(self, path: str, content: bytes) -> None:
        self.files[path] = content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40, help="training steps of the learning runs")
    parser.add_argument(
        "--only",
        choices=["speed", "learning"],
        help="one part; the other's results stay as they are",
    )
    arguments = parser.parse_args()
    results: dict[str, Any] = (
        json.loads(RESULTS.read_text()) if RESULTS.exists() else {"speed": [], "learning": []}
    )
    results["machine"] = describe_machine()
    if arguments.only != "learning":
        results["speed"], pictures = measure_speed()
        _stack_images(pictures).save(RESULTS.with_suffix(".png"))
        _write_results(results)
    if arguments.only != "speed":
        for runs in measure_learning(arguments.seeds, arguments.steps, results["learning"]):
            results["learning"] = runs
            _write_results(results)


def _write_results(results: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(format_report(results))


def measure_speed() -> tuple[list[dict[str, Any]], list[bytes]]:
    """Measure a step, by workload and mode. Returns the times, and the timelines of the first
    workload.
    """
    # Imported here, because learning needs no Ray.
    from ebbflow.online.ray_actor import ActorFolders
    from ebbflow.online.ray_workers import RayWorkers

    measured = []
    pictures = []
    # Pinned: without it the system moves workers between cores, and a core that both share would
    # hide what overlaps. Rollouts and rewards take turns, so that half a core each is one core.
    first, second = sorted(os.sched_getaffinity(0))[:2]
    half = {"count": 1, "cpus": 0.5, "cores": [second]}
    apart = {
        "placement": "ray",
        "resources": {"training": {"cpus": 1, "cores": [first]}, "rollout": half, "reward": half},
    }
    for (workload, stage), (mode, keys) in tqdm(
        [(w, m) for w in WORKLOADS.items() for m in MODES.items()], unit="run"
    ):
        recipe = _build_recipe(0, {"steps": SPEED_STEPS, **stage, **apart, "mode": mode, **keys})
        base, policy, table = prepare_inputs(recipe)
        placement = RayWorkers(StageContext(recipe, 0, 0), ActorFolders.from_paths(base, policy))
        recorder = FileRecorder()
        try:
            run_online_stage(
                StageContext(recipe, 0, 0), placement, read_prompts(table, "train"), recorder
            )
        # or the next mode would share the cores with this one's workers
        finally:
            placement.close()
        measured.append(
            {"workload": workload, "mode": mode}
            | _median_times(json.loads(recorder.files["timeline.json"]))
        )
        if workload == next(iter(WORKLOADS)):
            pictures.append(recorder.files["timeline.png"])
    return measured, pictures


def _median_times(timeline: dict[str, Any]) -> dict[str, float]:
    """Medians over the steps, in seconds: the step, its rollouts and rewards from the first to the
    last, its training.
    """
    steps = []
    rollouts = []
    training = []
    for step in timeline["steps"][WARM_UP:]:
        # receiving weights is neither a rollout nor training
        spans_of_step = [
            span
            for span in timeline["spans"]
            if span["step"] == step["step"] and span["task"] != "receive"
        ]
        generated = [span for span in spans_of_step if span["role"] in ("rollout", "reward")]
        steps.append(step["end"] - step["start"])
        rollouts.append(
            max(span["end"] for span in generated) - min(span["start"] for span in generated)
        )
        training.append(
            sum(span["end"] - span["start"] for span in spans_of_step if span["role"] == "training")
        )
    return {
        "step": median(steps),
        "rollout_and_reward": median(rollouts),
        "training": median(training),
    }


def measure_learning(
    seeds: list[int], steps: int, known: list[dict[str, Any]]
) -> Iterator[list[dict[str, Any]]]:
    """Held-out scores after the same number of steps, by algorithm, mode and seed; what is known is
    not run again.
    """
    runs_so_far = list(known)
    # modes inside of seeds, so that an interrupted benchmark compares modes of the same seeds
    runs = [(name, mode, seed) for name in LEARNING for seed in seeds for mode in MODES]
    for name, mode, seed in tqdm(runs, unit="run"):
        asked = {
            "algorithm": name,
            "mode": mode,
            "seed": seed,
            "steps": steps,
            "settings": LEARNING[name] | MODES[mode],
        }
        if not any(asked.items() <= run.items() for run in known):
            runs_so_far = [
                run
                for run in runs_so_far
                if (run["algorithm"], run["mode"], run["seed"]) != (name, mode, seed)
            ]
            run_result = asked | _train_run(asked)
            runs_so_far.append(run_result)
            tqdm.write(
                f"{name} {mode} {seed}: {run_result['before']['ocr']:.3f} ->"
                f" {run_result['after']['ocr']:.3f}"
            )
            yield runs_so_far


def _train_run(asked: dict[str, Any]) -> dict[str, Any]:
    """One run: held-out scores before and after, and the age of its oldest samples."""
    recipe = _build_recipe(
        asked["seed"], {"steps": asked["steps"], "mode": asked["mode"], **asked["settings"]}
    )
    base, folder, table = prepare_inputs(recipe)
    ctx = StageContext(recipe, 0, 0)
    model = open_model(recipe, base)
    policy, metadata = open_policy(ctx, model, folder)
    scorer = load_scorer(recipe.rewards, ())
    held_out = read_prompts(table, "held_out")
    recorder = MetricsRecorder()
    before = score_policy(recipe, model, policy, held_out, ())
    # In one process: how old samples are follows from the mode and not from the machine's speed.
    placement = open_local_workers(ctx, PolicyUpdater(policy, ctx.online_config, metadata), scorer)
    run_online_stage(ctx, placement, read_prompts(table, "train"), recorder)
    after = score_policy(recipe, model, policy, held_out, ())
    return {
        "before": before,
        "after": after,
        "staleness": max(step["staleness/max"] for step in recorder.metrics_rows),
    }


def _build_recipe(seed: int, stage: dict[str, Any]) -> Recipe:
    prompts = {"validation": 1, "held_out": 96}
    return Recipe.model_validate(
        {
            "seed": seed,
            "prompts": prompts,
            "guardrails": [],
            "stages": [{"kind": "online", **stage}],
        }
    )


def format_report(results: dict[str, Any]) -> str:
    """Both tables, in Markdown."""
    lines = ["# Modes of an online stage on the glyph task", ""]
    lines += [
        (
            f"`python -m benchmarks.online_modes` on {results['machine']['cpu']},"
            f" {results['machine']['cores']} cores."
        ),
        "",
    ]
    lines += ["## Time of a step", ""]
    lines += [
        "Training is pinned to one core, rollouts and rewards to another. Medians over the steps,"
        " in seconds. `bound`: the sum of"
    ]
    lines += [
        (
            "training and rollouts with rewards for sync, the larger of the two for the others,"
            " both as the sync run takes them."
        ),
        "",
    ]
    lines += ["![What each worker did when: sync, one-step-off, async](online_modes.png)", ""]
    lines += [
        (
            "| workload | mode | rollout + reward | training | step | bound | step / bound | sync /"
            " this |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for workload in dict.fromkeys(row["workload"] for row in results["speed"]):
        rows = [row for row in results["speed"] if row["workload"] == workload]
        lines += [_format_speed_row(row, rows[0]) for row in rows]
    lines += ["", "## What is learnt in the same number of steps", ""]
    lines += [
        (
            "Held-out OCR score, one process, the same base model; mean and standard deviation over"
            " seeds."
        ),
        "",
    ]
    lines += [
        (
            "| algorithm | mode | oldest samples (steps) | before | after, by seed | after |"
            " velocity drift |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for name, mode in [(name, mode) for name in LEARNING for mode in MODES]:
        rows = [
            row for row in results["learning"] if (row["algorithm"], row["mode"]) == (name, mode)
        ]
        lines += [_format_learning_row(name, mode, rows)] if rows else []
    return "\n".join(lines) + "\n"


def _format_speed_row(row: dict[str, Any], sync: dict[str, Any]) -> str:
    # The least that a mode can take: the sum where nothing overlaps, the longer part where all
    # does. Parts of the sync run, as overlapping ones slow each other down.
    parts = (sync["rollout_and_reward"], sync["training"])
    bound = sum(parts) if row["mode"] == "sync" else max(parts)
    numbers = (
        row["rollout_and_reward"],
        row["training"],
        row["step"],
        bound,
        row["step"] / bound,
        sync["step"] / row["step"],
    )
    return (
        f"| {row['workload']} | {row['mode']} | "
        + " | ".join(f"{number:.2f}" for number in numbers)
        + " |"
    )


def _format_learning_row(name: str, mode: str, rows: list[dict[str, Any]]) -> str:
    after = [row["after"]["ocr"] for row in rows]
    drift = fmean(row["after"]["velocity_drift"] for row in rows)
    spread = f" ± {stdev(after):.3f}" if len(after) > 1 else ""
    seeds = ", ".join(f"{value:.3f}" for value in after)
    return (
        f"| {name} | {mode} | {max(row['staleness'] for row in rows)} |"
        f" {fmean(row['before']['ocr'] for row in rows):.3f} | {seeds} | {fmean(after):.3f}{spread}"
        f" | {drift:.3f} |"
    )


def _stack_images(pngs: list[bytes]) -> Image.Image:
    pictures = [Image.open(io.BytesIO(png)).convert("RGB") for png in pngs]
    sheet = Image.new(
        "RGB",
        (max(picture.width for picture in pictures), sum(picture.height for picture in pictures)),
        "white",
    )
    for index, picture in enumerate(pictures):
        sheet.paste(picture, (0, sum(before.height for before in pictures[:index])))
    return sheet


if __name__ == "__main__":
    main()
