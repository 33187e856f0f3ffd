"""Images per second of a colocated online stage with two processes against one, each with one
thread on a core of its own: ``python -m benchmarks.colocated [--turns N] [--write]``.

A turn runs the same stage in one process, then in two; the next turn begins with the two. The ratio
is the median over the turns, which other work on the machine disturbs alike. It takes some minutes,
and needs two cores.
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
from statistics import median

import pyarrow as pa
import torch
from tqdm import tqdm

from benchmarks.machine import describe_machine
from benchmarks.online_modes import FileRecorder
from ebbflow.data.prompts import write_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.models.prepare import train_base_folder
from ebbflow.online.loop import train_online_folder
from ebbflow.recipe import Recipe
from ebbflow.recipe.model import GlyphTrainingConfig
from ebbflow.stage import StageContext, StageFolders
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training.distributed import join_process_group
from ebbflow.training.policy_metadata import write_base_policy

RESULTS = Path(__file__).parent / "results" / "colocated.md"
WANTED = 1.8
PROCESSES = (1, 2)
STEPS = 6
WARM_UP = 2
"""Steps of a stage, and those at its beginning that are left out."""
STAGE = {
    "kind": "online",
    "placement": "colocated",
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="runs of both (5)")
    parser.add_argument(
        "--write", action="store_true", help="keep the page in benchmarks/results/colocated.md"
    )
    arguments = parser.parse_args()
    turns = []
    with tempfile.TemporaryDirectory() as folder:
        prepare_inputs(Path(folder))
        for turn in tqdm(range(arguments.turns), unit="turn"):
            order = PROCESSES if turn % 2 == 0 else PROCESSES[::-1]
            seconds = {world: run_group(Path(folder), world) for world in order}
            turns.append(seconds)
            tqdm.write(f"{seconds[1] / seconds[2]:.2f}")
    page = format_page(turns, shlex.join(["python", "-m", "benchmarks.colocated", *sys.argv[1:]]))
    print(page)
    if arguments.write:
        RESULTS.write_text(page)


def build_recipe() -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"training": {"steps": 30, "batch": 16}},
            "rewards": [{"name": "similarity"}],
            "guardrails": [],
            "stages": [STAGE],
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


def run_group(folder: Path, world: int) -> float:
    """Run the stage in a group of processes; return the median seconds of a step."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(
        _run_rank, (folder, world, port), nprocs=world, start_method="spawn"
    )
    timeline = json.loads((folder / "timeline.json").read_text())
    return median(step["end"] - step["start"] for step in timeline["steps"][WARM_UP:])


def _run_rank(rank: int, folder: Path, world: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    recorder = FileRecorder()
    with join_process_group(), tempfile.TemporaryDirectory() as trained:
        train_online_folder(
            StageContext(build_recipe(), 0, 0),
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
        (folder / "timeline.json").write_bytes(recorder.files["timeline.json"])


def format_page(turns: list[dict[int, float]], command: str) -> str:
    """Format the page, given the seconds of a step by the number of processes, in each turn."""
    machine = describe_machine()
    ratios = [seconds[1] / seconds[2] for seconds in turns]
    lines = [
        "# Two processes against one",
        "",
        f"Written by `{command}` on {machine['cpu']}, {machine['cores']} cores: a colocated stage"
        f" of Flow-GRPO on the glyph task, all steps trained, {IMAGES_PER_STEP} images a step. Each"
        " process has one thread on a core of its own.",
        "",
        "| turn | images/s, one process | images/s, two processes | ratio |",
        "|---|---|---|---|",
    ]
    for number, seconds in enumerate(turns, 1):
        rates = " | ".join(f"{IMAGES_PER_STEP / seconds[world]:.1f}" for world in PROCESSES)
        lines.append(f"| {number} | {rates} | {seconds[1] / seconds[2]:.2f} |")
    lines.append(f"| median | | | {median(ratios):.2f} (wanted ≥ {WANTED}) |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
