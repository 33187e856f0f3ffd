"""The way from the beginning of a step of an online stage to its first loss does not get longer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_FUNCTIONS = 144  # wanted: 150
MAX_FILES = 34  # wanted: 30
MAX_TYPES = 24  # of which 10 hold a sample between the request and the loss; wanted: 8


def test_a_first_loss_takes_few_functions_and_files() -> None:
    """In a process of its own: one that has imported or cached more calls less in the step."""
    counted = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_loss", "--list"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    numbers = re.search(r"^(\d+) functions in (\d+) files, (\d+) types$", counted, re.MULTILINE)
    assert numbers, counted
    # From the first function of the step to the last before the backward pass.
    assert "OnlineLoop._train_steps" in counted
    assert "PolicyUpdater._compute_loss" in counted
    assert int(numbers[1]) <= MAX_FUNCTIONS, counted
    assert int(numbers[2]) <= MAX_FILES, counted
    assert int(numbers[3]) <= MAX_TYPES, counted
