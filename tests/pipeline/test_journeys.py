"""What three people do on their first day, with commands of the documentation alone: a researcher
whose own reward is promoted at the first try, an engineer whose run is interrupted, and a sceptic
who checks what the run claims.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked import ROOT, run_forked

pytestmark = pytest.mark.exhaustive
EBBFLOW = Path(sys.executable).with_name("ebbflow")
DOCS = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
REWARD = '''"""Fine grain: the mean difference of neighbouring pixels."""

import numpy as np


def score_grain(images, prompts):
    grey = images.astype(np.float64).mean(-1)
    return np.abs(np.diff(grey, axis=-1)).mean((1, 2)) / 255
'''
RECIPE = """
name: grain
model: {training: {steps: 30, batch: 16}}
prompts: {source: prompts.txt, validation: 4, held_out: 24}
rewards: ["grain:score_grain"]
stages:
  - kind: online
    steps: 4
    prompts_per_step: 4
    group_size: 8
    micro_batch: 32
    updates_per_step: 2
    shared_initial_noise: false
    algorithm: {name: mix_grpo, clip_range: 1.0e-3}
    sampler: {name: flow_sde, steps: 6}
    window: {kind: progressive, size: 3, limit: 0.5, steps_per_window: 10}
    optimizer: {lr: 5.0e-3, weight_decay: 0.0}
evaluation: {steps: 3}
promotion:
  model_name: grain
  # This reward changes what the statistics measure: that is what it is for.
  margins: {entropy: null, edge_density: null, brightness: null, sharpness: null}
"""
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first-day")
    (folder / "grain.py").write_text(REWARD)
    (folder / "recipe.yaml").write_text(RECIPE)
    # Plain prompts, without quoted text: words that the demo's model can draw.
    prompts = [f"{first}{vowel}{last}" for first in "BCDFGHJ" for vowel in "AO" for last in "LNPRT"]
    (folder / "prompts.txt").write_text("\n".join(prompts) + "\n")
    return folder


@pytest.fixture(scope="module")
def ebbflow(workplace: Path) -> Run:
    environment = os.environ | {"HOME": str(workplace), "PYTHONPATH": str(ROOT)}
    environment.pop("MLFLOW_TRACKING_URI", None)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        assert f"ebbflow {words[0]}" in DOCS
        return run_forked([str(EBBFLOW), *words], cwd=workplace, env=environment, timeout=900)

    return run


def test_a_researcher_gets_an_own_reward_promoted_at_the_first_try(
    workplace: Path, ebbflow: Run
) -> None:
    checked = ebbflow("check", "recipe.yaml")
    assert checked.returncode == 0, checked.stderr
    assert "# the gate decides on 24 held-out prompts" in checked.stdout
    done = ebbflow("run", "recipe.yaml")
    assert done.returncode == 0, done.stderr
    assert "PROMOTED: grain version 1" in done.stdout
    listed = ebbflow("runs").stdout
    assert re.search(r"finished +[\d.]+ -> [\d.]+ +promoted, version 1", listed)


def test_an_engineer_resumes_a_run_that_was_interrupted(workplace: Path, ebbflow: Run) -> None:
    other = workplace / "other.yaml"
    other.write_text(RECIPE.replace("name: grain", "name: resumed"))
    environment = os.environ | {"HOME": str(workplace), "PYTHONPATH": str(ROOT)}
    command = [str(EBBFLOW), "run", "other.yaml"]
    with subprocess.Popen(
        command, cwd=workplace, env=environment, stderr=subprocess.PIPE, text=True
    ) as started:
        while not list(workplace.glob("runs/resumed-*/nodes/1.1-online")):
            assert started.poll() is None
            time.sleep(0.1)
        started.send_signal(signal.SIGINT)
        _, said = started.communicate(timeout=300)
    assert started.returncode == 130
    assert "resume with: ebbflow run other.yaml" in said
    assert "stopped in 1.1 online" in ebbflow("runs").stdout
    assert ebbflow("run", "other.yaml").returncode == 0
    line = next(line for line in ebbflow("runs").stdout.splitlines() if "resumed-" in line)
    assert "finished, resumed once after" in line


def test_a_sceptic_checks_what_the_run_claims(workplace: Path, ebbflow: Run) -> None:
    verified = ebbflow("verify", "grain", "--again", "--recipe", "recipe.yaml")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    # On other noise than the gate's, the champion still gains, and against itself it gains nothing.
    assert ebbflow("evaluate", "grain", "--recipe", "recipe.yaml").returncode == 0
    assert ebbflow("evaluate", "grain", "--against", "grain", "--recipe", "recipe.yaml").stdout
    decisions = {
        path.parent.name: json.loads(path.read_text())["decision"]
        for path in workplace.glob("evaluations/grain/*/evaluation.json")
    }
    gained = decisions["grain-version-1-against-the-base-model"]["target"]
    assert gained["low"] > 0
    same = decisions["grain-version-1-against-grain-version-1-again"]["target"]
    assert same["difference"] == 0
    [run] = workplace.glob("runs/grain-*")
    replayed = ebbflow("replay", f"runs/{run.name}", "--stage", "1.1", "--step", "1")
    assert replayed.returncode == 0, replayed.stderr
