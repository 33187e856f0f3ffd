"""vLLM-Omni, where its environment is installed: the parity of a step, with the bar off."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from benchmarks.first_hour.lines import Line, Setting, judge, skip
from benchmarks.first_hour.model_folder import describe_model, find_model_folder
from benchmarks.first_hour.parts.rewards import PROMPTS, Brightness
from ebbflow.models import load_model
from ebbflow.online.loop import run_online_stage
from ebbflow.online.sample_workers import RolloutWorker
from ebbflow.online.training_worker import TrainingWorker
from ebbflow.online.workers import LocalWorkers
from ebbflow.recipe import Recipe
from ebbflow.rewards.combine import Scorer
from ebbflow.rollouts.engine import open_engine
from ebbflow.rollouts.vllm_omni import PYTHON, VARIABLE
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater

CLAIM = "vLLM-Omni generates what the policy does, up to its rounding"
ROUNDINGS = 3
"""Times the policy's own rounding: what the gate lets pass by default."""
OFF = 1e9
STEPS = 3


def measure(setting: Setting) -> Iterator[Line]:
    if not Path(os.environ.get(VARIABLE, PYTHON)).exists():
        yield skip(CLAIM, f"vLLM-Omni is not installed; set {VARIABLE} to its environment's Python")
        return
    folder = find_model_folder(setting.folder, "tiny")
    recipe = Recipe.model_validate(
        {
            "model": describe_model(folder, "tiny").model_dump(),
            "policy": {"train": "lora", "rank": 4, "alpha": 8},
            "stages": [
                {
                    "kind": "online",
                    "engine": "vllm_omni",
                    "parity": {"max_shift": OFF, "every": 1},
                    "steps": STEPS,
                    "prompts_per_step": 2,
                    "group_size": 2,
                    "micro_batch": 4,
                    "updates_per_step": 1,
                    "drift_alarm": 1e9,
                    "algorithm": {"name": "mix_grpo"},
                    "sampler": {"steps": 6},
                    "window": {"kind": "fixed", "size": 2},
                    "optimizer": {"lr": 1e-3},
                }
            ],
        }
    )
    ctx = StageContext(recipe, 0, 0)
    policy = Policy(load_model(folder, recipe.model), recipe.policy, seed=0)
    for name in ctx.following_copies:
        policy.ensure_copy(name)
    recorder = MetricsRecorder()
    with closing(open_engine(ctx, folder)) as engine:
        trainer = TrainingWorker(ctx, PolicyUpdater(policy, ctx.online_config))
        workers = LocalWorkers(trainer, Scorer(((Brightness(), 1.0),)), RolloutWorker(engine))
        run_online_stage(ctx, workers, PROMPTS, recorder)
    shifts = [
        (row["parity/mean_shift"], row["parity/rounding_shift"]) for row in recorder.metrics_rows
    ]
    worst, rounding = max(shifts, key=lambda shift: shift[0] / max(shift[1], 1e-12))
    yield judge(
        CLAIM,
        worst <= ROUNDINGS * rounding,
        f"a shift of {worst:.1e} where the policy rounds by {rounding:.1e}",
        f"<= {ROUNDINGS} roundings",
    )
