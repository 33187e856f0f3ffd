"""Recipes of the repository, whole, as a user starts them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch
import yaml

from benchmarks.first_hour.lines import Line, Setting, judge

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "workflows" / "recipes"
COMMAND = (sys.executable, "-c", "from ebbflow.cli import main; main()", "run")


def measure(setting: Setting, name: str) -> Iterator[Line]:
    claim = f"the recipe {name} runs to its end on the device"
    path = write_recipe(setting, name, "runs")
    log = setting.folder / f"{name}.log"
    start = time.monotonic()
    with log.open("w") as file:
        done = start_run(path, file).wait()
    device = find_device(log.read_text())
    wanted = "cpu" if not torch.cuda.is_available() else torch.cuda.get_device_name()
    yield judge(
        claim,
        done == 0 and device == wanted,
        f"exit {done}, {time.monotonic() - start:.0f} s, on {device}",
        f"exit 0, on {wanted}",
        "; ".join(log.read_text().strip().splitlines()[-3:])[-300:],
    )


def write_recipe(setting: Setting, name: str, output: str) -> Path:
    """Write a recipe of the repository with deterministic kernels and an output of its own."""
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    recipe["deterministic"] = True
    recipe["output"] = str(setting.folder / output)
    if name == "tiny":
        # The part resume kills the run after the first of them.
        recipe["stages"][0]["checkpoints"] = {"every": 1}
    path = setting.folder / f"{name}-{output}.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def start_run(recipe: Path, log: IO[str]) -> subprocess.Popen[str]:
    """Start ``ebbflow run`` in a process group of its own."""
    variables = {
        # One rank: the default of two would look for a second GPU.
        "EBBFLOW_TRAIN_PROCESSES": "1",
        "EBBFLOW_GPUS": "1" if torch.cuda.is_available() else "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.Popen(
        [*COMMAND, str(recipe)],
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | variables,
        start_new_session=True,
    )


def find_device(log: str) -> str:
    """Find what the run said that it computes on."""
    match = re.search(r"computing on device (.+?), (?:driver|torch) ", log)
    return match[1] if match else "nothing that it named"
