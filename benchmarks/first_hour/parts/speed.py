"""Images per second and the share of the peak at the size of SD3.5 medium, against diffusers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from benchmarks.first_hour.kernels import profile_call
from benchmarks.first_hour.lines import Line, Setting, judge, skip
from benchmarks.first_hour.parts.ratio import move_adapters
from benchmarks.gpu import GUIDANCE, run_benchmark
from benchmarks.gpu_sides import (
    LORA,
    SIZES,
    Bench,
    build_sides,
    generate_random_prompts,
    predict_plainly,
)
from ebbflow.models.base import default_device, predict
from ebbflow.training.policy import Policy

RATIO = 0.9
"""Of diffusers' images per second: the least that a run may have."""
MOST_KERNELS = 1.1
"""Of the kernels of diffusers' forward pass in bfloat16."""
MOST_IDLE = 0.1
FORWARD = 0.36
BACKWARD = 0.30
"""Shares of what a large product reaches, as predicted at first; the aims are .60 and .50."""
REPEAT = 3


def measure(setting: Setting) -> Iterator[Line]:
    device = default_device()
    on_gpu = device.type == "cuda"
    size = SIZES[setting.size]
    # On a CPU in float32: it is slow in bfloat16, and nothing is judged there.
    results = run_benchmark(size, device, "bfloat16" if on_gpu else "float32", REPEAT)
    (setting.folder / "speed.json").write_text(json.dumps(results, indent=1) + "\n")
    yield from judge_speed(results, on_gpu)
    claims = (
        "a forward pass with adapters starts few more kernels than one of diffusers",
        "the device is busy during a forward pass with adapters",
    )
    if not on_gpu:
        for claim in claims:
            yield skip(claim, "a CPU starts no kernels")
        return
    bench = build_sides(size, device, "bfloat16")
    lines, _ = judge_kernels(claims, *build_calls(bench))
    yield from lines


def judge_speed(results: Mapping[str, Any], judged: bool) -> Iterator[Line]:
    """Judge the slowest row of each phase of ``benchmarks.gpu``."""
    rows = results["measured"]
    phases = {
        "rollouts are as fast as diffusers' own loop": "rollout",
        "rollouts with adapters are as fast as diffusers' own loop": "rollout, LoRA",
        "updates are as fast as a plain training loop": "update, LoRA",
    }
    for claim, phase in phases.items():
        slowest = min((row for row in rows if row["phase"] == phase), key=lambda row: row["ratio"])
        number = f"{slowest['ratio']:.2f} ({slowest['ours']['images_per_second']:.3g} images/s)"
        if judged:
            yield judge(claim, slowest["ratio"] >= RATIO, number, f">= {RATIO}")
        else:
            yield skip(claim, "a CPU proves the benchmark only", number)
    shares = {
        "the share of the peak in rollouts with adapters": ("rollout, LoRA", FORWARD),
        "the share of the peak in updates": ("update, LoRA", BACKWARD),
    }
    for claim, (phase, bar) in shares.items():
        share = max(row["ours"]["share_of_peak"] for row in rows if row["phase"] == phase)
        number = f"{share:.2f} of a large product"
        if judged:
            yield judge(claim, share >= bar, number, f">= {bar}")
        else:
            yield skip(claim, "a CPU proves the benchmark only", number)


def build_calls(bench: Bench) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a forward pass of diffusers and then ours with adapters, which are added between."""
    rows = bench.size.training_micro_batch
    prompts = generate_random_prompts(bench.size, rows, GUIDANCE, bench.device, torch.bfloat16)
    sigma = torch.full((rows,), 0.5, device=bench.device)
    latents = bench.noise[:rows]

    @torch.no_grad()
    def run_plain() -> None:
        # Before there are adapters, and without autocast, as the pipeline calls it.
        predict_plainly(bench, latents.bfloat16(), sigma, prompts)

    policies: list[Policy] = []

    @torch.no_grad()
    def run_ours() -> None:
        if not policies:
            policies.append(Policy(bench.model, LORA, seed=0))
            move_adapters(policies[0])
        predict(bench.model, latents, sigma, prompts)

    return run_plain, run_ours


def judge_kernels(
    claims: tuple[str, str], run_plain: Callable[[], Any], run_ours: Callable[[], Any]
) -> tuple[list[Line], float]:
    """Return the lines of kernels and of idle time, and the milliseconds of our pass."""
    plain = profile_call(run_plain)
    ours = profile_call(run_ours)
    ratio = ours.kernels / max(1, plain.kernels)
    kernels = judge(
        claims[0],
        0 < ratio <= MOST_KERNELS,
        f"{ours.kernels} against {plain.kernels} ({ratio:.2f}); {ours.milliseconds:.1f} ms"
        f" against {plain.milliseconds:.1f}",
        f"<= {MOST_KERNELS}",
    )
    idle = judge(
        claims[1], ours.idle <= MOST_IDLE, f"idle for {ours.idle:.0%}", f"<= {MOST_IDLE:.0%}"
    )
    return [kernels, idle], ours.milliseconds
