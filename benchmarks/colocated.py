"""Images per second of an online stage on two cores, a thread on each: colocated, and with roles of
their own on Ray, against one process: ``python -m benchmarks.colocated [--turns N] [--write]``.

A turn runs the same stage in every way, the next turn in the reverse order. Ratios are medians over
the turns, which other work on the machine disturbs alike. What two cores share (memory, cache,
clock) is in the row of two stages side by side, which know nothing of each other: no group of two
processes is faster. It takes some minutes, and needs two cores that have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from tqdm import tqdm

from benchmarks.machine import describe_machine
from benchmarks.online_modes import FileRecorder
from ebbflow.data.prompts import read_prompts, write_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.models.prepare import train_base_folder
from ebbflow.online.loop import run_online_stage
from ebbflow.online.train_folder import train_online_folder
from ebbflow.recipe import Recipe
from ebbflow.recipe.model import GlyphTrainingConfig
from ebbflow.stage import StageContext, StageFolders
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training.distributed import join_process_group
from ebbflow.training.policy_metadata import write_base_policy

RESULTS = Path(__file__).parent / "results" / "colocated.md"
WANTED = 1.8
STEPS = 8
WARM_UP = 3
"""Steps of a stage, and those at its beginning that are left out."""
STAGE = {
    "kind": "online",
    "steps": STEPS,
    "prompts_per_step": 8,
    "group_size": 8,
    "micro_batch": 16,
    "updates_per_step": 1,
    "shared_initial_noise": False,
    "algorithm": {"name": "flow_grpo", "clip_range": 1e-3},
    "sampler": {"steps": 6},
    "optimizer": {"lr": 3e-4, "weight_decay": 0.0},
}
"""Eight groups in four requests: both processes have as many of either."""
IMAGES_PER_STEP = 8 * 8
ALONE = "one process"
SIDE_BY_SIDE = "two stages side by side"
COLOCATED = "colocated, two processes"
WAYS = {
    ALONE: "a stage in one process, on one core",
    SIDE_BY_SIDE: "two such stages at the same time: what the two cores can do",
    COLOCATED: "a group of two processes",
    "ray, sync": "training on one core, rollouts and rewards on the other",
    "ray, one_step_off": "the same, where the rollouts of a step run beside the training before it",
}
TASKS = ("rollout", "scoring", "training")


class Measurement(NamedTuple):
    """What stages that ran at the same time took.

    Attributes:
        rate: images per second, of all of them.
        seconds: of a step that a worker is busy, by task, a mean over the workers.
        step: seconds of a step.
    """

    rate: float
    seconds: dict[str, float]
    step: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="runs of both (5)")
    parser.add_argument(
        "--write", action="store_true", help="keep the page in benchmarks/results/colocated.md"
    )
    arguments = parser.parse_args()
    turns: list[dict[str, Measurement]] = []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        prepare_inputs(Path(folder))
        for turn in tqdm(range(arguments.turns), unit="turn"):
            order = list(WAYS) if turn % 2 == 0 else list(WAYS)[::-1]
            turns.append({way: run_stages(Path(folder), way) for way in order})
            tqdm.write(f"{turns[-1][COLOCATED].rate / turns[-1][ALONE].rate:.2f}")
    page = format_page(
        turns, load, shlex.join(["python", "-m", "benchmarks.colocated", *sys.argv[1:]])
    )
    print(page)
    if arguments.write:
        RESULTS.write_text(page)


def build_recipe(**keys: Any) -> Recipe:
    """Return the recipe of the stage, with other keys in it."""
    return Recipe.model_validate(
        {
            "model": {"training": {"steps": 30, "batch": 16}},
            "rewards": [{"name": "similarity"}],
            "guardrails": [],
            "stages": [STAGE | keys],
        }
    )


def prepare_inputs(folder: Path) -> None:
    """Write a base model, the policy that the stage begins with, and prompts."""
    recipe = build_recipe()
    train_base_folder(GlyphTrainingConfig(steps=30, batch=16), 1, folder / "base")
    base = verify_folder(folder / "base")
    write_base_policy(folder / "start", base, recipe.digest, recipe.policy)
    rows = [
        {
            "prompt_id": number,
            "prompt": f'"{text}"',
            "negative_prompt": "",
            "target": text,
            "source": "test",
            "split": "train",
            "metadata": "{}",
        }
        for number, text in enumerate(f"{first}{second}AB" for first in "CDEF" for second in "GHIJ")
    ]
    write_prompts(pa.Table.from_pylist(rows, PROMPTS), folder / "prompts.parquet")


def run_stages(folder: Path, way: str) -> Measurement:
    """Run the stage in one of the ways, in processes that end with it."""
    if way.startswith("ray"):
        torch.multiprocessing.start_processes(
            _run_on_ray, (folder, way.split(", ")[1]), nprocs=1, start_method="spawn"
        )
        return measure_timelines([folder / "timeline-0.json"])
    num_processes = 1 if way == ALONE else 2
    world = num_processes if way == COLOCATED else 1
    torch.multiprocessing.start_processes(
        _run_rank,
        (folder, world, [_find_free_port() for _ in range(num_processes)]),
        nprocs=num_processes,
        start_method="spawn",
    )
    return measure_timelines(
        [folder / f"timeline-{number}.json" for number in range(num_processes // world)]
    )


def _find_free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def measure_timelines(timelines: list[Path]) -> Measurement:
    """Measure stages that ran at the same time, by the median of their steps."""
    steps = []
    seconds: dict[str, list[float]] = {task: [] for task in TASKS}
    for path in timelines:
        timeline = json.loads(path.read_text())
        # Steps that wait for imports or for workers that still load are left out.
        measured = timeline["steps"][WARM_UP:]
        steps.append(median(step["end"] - step["start"] for step in measured))
        for task in TASKS:
            spans = [span for span in timeline["spans"] if span["task"] == task]
            # Ranks write one timeline together, in which each of them is a worker.
            num_workers = len({span["worker"] for span in spans})
            by_step = [
                sum(span["end"] - span["start"] for span in spans if span["step"] == step["step"])
                for step in measured
            ]
            seconds[task].append(median(by_step) / max(num_workers, 1))
    rate = sum(IMAGES_PER_STEP / step for step in steps)
    return Measurement(rate, {task: fmean(each) for task, each in seconds.items()}, fmean(steps))


def _run_rank(number: int, folder: Path, world: int, ports: list[int]) -> None:
    """Run the stage as rank ``number`` of a group of two, or as a group of one."""
    # Stages side by side are two groups of one, each of which meets at a port of its own.
    rank = number if world > 1 else 0
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports[0] if world > 1 else ports[number]),
    }
    # Pinned: the system would move processes between the cores.
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[number]})
    torch.set_num_threads(1)
    recorder = FileRecorder()
    with join_process_group(), tempfile.TemporaryDirectory() as trained:
        train_online_folder(
            StageContext(build_recipe(placement="colocated"), 0, 0),
            StageFolders(
                folder / "base",
                folder / "start",
                folder / "prompts.parquet",
                Path(trained) / "policy",
            ),
            recorder,
            replicas=world,
        )
    if rank == 0:
        (folder / f"timeline-{number}.json").write_bytes(recorder.files["timeline.json"])


def _run_on_ray(_: int, folder: Path, mode: str) -> None:
    # Imported here, because the other ways need no Ray.
    from ebbflow.online.ray_actor import ActorFolders
    from ebbflow.online.ray_workers import RayWorkers

    # As in benchmarks.online_modes: rollouts and rewards take turns on the second core.
    first, second = sorted(os.sched_getaffinity(0))[:2]
    half = {"count": 1, "cpus": 0.5, "cores": [second]}
    resources = {"training": {"cpus": 1, "cores": [first]}, "rollout": half, "reward": half}
    ctx = StageContext(build_recipe(placement="ray", mode=mode, resources=resources), 0, 0)
    recorder = FileRecorder()
    workers = RayWorkers(ctx, ActorFolders.from_paths(folder / "base", folder / "start"))
    try:
        prompts = read_prompts(folder / "prompts.parquet", "train")
        run_online_stage(ctx, workers, prompts, recorder)
    finally:
        workers.close()
    (folder / "timeline-0.json").write_bytes(recorder.files["timeline.json"])


def format_page(turns: list[dict[str, Measurement]], load: float, command: str) -> str:
    """Format the page, given the measurement of every way in each turn."""
    machine = describe_machine()
    lines = [
        "# Two cores against one",
        "",
        f"Written by `{command}` on {machine['cpu']}, {machine['cores']} cores, which had a load of"
        f" {load:.1f} before: an online stage of Flow-GRPO on the glyph task, all steps trained,"
        f" {IMAGES_PER_STEP} images a step. Each process has one thread on a core of its own."
        f" Ratios are medians of {len(turns)} turns, with the least and the most.",
        "",
        "| | images/s | of one process | of two side by side |",
        "|---|---|---|---|",
    ]
    for way, description in WAYS.items():
        rate = median(turn[way].rate for turn in turns)
        ratios = [
            _format_ratios([turn[way].rate / turn[other].rate for turn in turns])
            for other in (ALONE, SIDE_BY_SIDE)
        ]
        lines.append(f"| {way}: {description} | {rate:.1f} | {' | '.join(ratios)} |")
    lines += [
        "",
        f"Wanted: {COLOCATED} ≥ {WANTED} × one process.",
        "",
        "Milliseconds of a step. Those of a task are a mean over the workers that have it; on Ray"
        " they overlap or take turns on two cores.",
        "",
        f"| | step | {' | '.join(TASKS)} | rest |",
        "|---|" + "---|" * (len(TASKS) + 2),
    ]
    for way in WAYS:
        step = median(turn[way].step for turn in turns)
        tasks = [median(turn[way].seconds[task] for turn in turns) for task in TASKS]
        # What is no task: gathering, waiting for the other rank, advantages, metrics.
        rest = "" if way.startswith("ray") else f"{1000 * (step - sum(tasks)):.0f}"
        cells = " | ".join(f"{1000 * seconds:.0f}" for seconds in [step, *tasks])
        lines.append(f"| {way} | {cells} | {rest} |")
    return "\n".join(lines) + "\n"


def _format_ratios(ratios: list[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    main()
