"""How far the first ratio of an update is from 1 in bfloat16, with adapters that are not zero."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.first_hour.lines import Line, Setting, judge, skip
from benchmarks.gpu import compile_blocks, measure_ratio_errors
from benchmarks.gpu_sides import LORA, SIZES, STAGE, Bench, build_sides
from ebbflow.models.base import default_device
from ebbflow.training.policy import Policy

CLIP_RANGE: float = STAGE.hyper_parameters.clip_range
MOVED = 0.02
"""Standard deviation of the adapters' second factors: far more than a run's first updates."""


def measure(setting: Setting) -> Iterator[Line]:
    torch.manual_seed(0)
    bench = build_sides(SIZES[setting.size], default_device(), "bfloat16")
    move_adapters(Policy(bench.model, LORA, seed=0))
    yield from judge_errors("eager", bench)
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        for kind in ("equal", "unequal"):
            yield skip(name_claim("compiled", kind), "torch.compile needs a C++ compiler")
        return
    compile_blocks(bench)
    yield from judge_errors("compiled", bench)


@torch.no_grad()
def move_adapters(policy: Policy) -> None:
    """Give the second factors of all adapters numbers: zeros would hide their products."""
    for name, parameter in policy.parameters.items():
        if "lora_B" in name:
            parameter.normal_(std=MOVED)


def name_claim(mode: str, rows: str) -> str:
    if rows == "equal":
        return f"{mode}, equal rows: the first log-ratio is 0"
    return f"{mode}, unequal rows: the first log-ratio is below a tenth of the clip range"


def judge_errors(mode: str, bench: Bench) -> Iterator[Line]:
    """Compare rollouts of as many rows as training has, and of others, with training."""
    errors: list[dict[str, Any]] = measure_ratio_errors(bench)
    equal = [row for row in errors if row["rollout_rows"] == row["training_rows"]]
    unequal = [row for row in errors if row["rollout_rows"] != row["training_rows"]]
    exact = max(row["max_log_density"] for row in equal)
    yield judge(name_claim(mode, "equal"), exact == 0, f"{exact:.1e} (log-density)", "exactly 0")
    claim = name_claim(mode, "unequal")
    mean = max(row["mean_log_prob"] for row in unequal)
    bar = CLIP_RANGE / 10
    yield judge(claim, mean <= bar, f"{mean:.1e} (mean of log-probs)", f"<= {bar:.0e}")
