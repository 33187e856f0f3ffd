"""CPU-seconds of rollouts and updates against bare torch: ``python -m benchmarks.speed [--compile]
[--free-network] [--peer NAME=PATH] [--write]``.

A rollout is compared with its forward passes alone: the same network on as many rows as often, with
all inputs ready. An update without reference and copies is compared with forward, squared error,
backward and the same AdamW, without clipping, metrics and checks. A step with our best settings is
compared with the same step without them. Both sides take turns in one process, and each is first in
every other turn; the ratio is the median over the turns, so that other work on the machine cancels
out.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.free_network import build_part
from benchmarks.gpu_sides import SIZES, WIDE, ModelSize, build_random_model, generate_random_prompts
from benchmarks.peer_loops import SCRIPTS, parse_checkout
from benchmarks.peers import format_peer_part, list_peer_cases
from benchmarks.speed_report import Call, Case, MedianTimes, format_report, replace_part
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan
from ebbflow.models.base import Conditioning, Model
from ebbflow.models.compile import compile_blocks
from ebbflow.models.families.glyph import build_glyph_model
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.model import GlyphTrainingConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.rollouts.generate import generate_samples
from ebbflow.training.batches import (
    TrajectoryBatch,
    build_forward_batch,
    build_trajectory_batch,
    split_into_passes,
)
from ebbflow.training.drift import WATCHED_EVERY, WATCHED_FIRST
from ebbflow.training.optimizer import build_optimizer
from ebbflow.training.policy import Policy
from ebbflow.training.rollout_forward import reuse_rollout_forward
from ebbflow.training.update import PolicyUpdater

RESULTS = Path(__file__).parent / "results" / "speed.md"
STEPS = 10
"""Denoising steps of every rollout."""
# No reference and no copy: each would be a second forward pass, which the bare side does not have.
FORWARD_STAGE = OnlineStageConfig.model_validate(
    {
        "algorithm": {"name": "rwr", "noise_levels": 3},
        "sampler": {"name": "ode", "steps": STEPS},
        "reference": {"weight": 0.0},
        "optimizer": {"lr": 1e-6, "weight_decay": 0.0},
    }
)
TRAINED = (1, 2, 3)
"""A window of three steps."""
EVERY = tuple(range(STEPS - 1))
"""All steps but the last, which adds no noise and has no ratio."""
GUIDANCE = 4.5
"""The guidance of SD3's pipeline: a prediction is two rows."""
STAGE = OnlineStageConfig.model_validate(
    {
        "algorithm": {"name": "flow_grpo", "clip_range": 1e-3},
        "sampler": {"name": "flow_sde", "steps": STEPS},
        "window": {"kind": "fixed", "size": 3},
        "reference": {"weight": 0.0},
        # the same parameters are trained many times over, and must not lead anywhere
        "optimizer": {"lr": 1e-6, "weight_decay": 0.0},
    }
)


@dataclass(frozen=True)
class Bench:
    """A model and what a rollout of it generates.

    Attributes:
        prompts: encoded, a row for each image.
        rows: images of a forward pass; divides the number of prompts.
    """

    model: Model
    prompts: Conditioning
    rows: int

    @property
    def sample_keys(self) -> SampleKeys:
        return SampleKeys(0, list(range(len(self.prompts))), [0] * len(self.prompts))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repeat",
        type=int,
        default=11,
        metavar="N",
        help="turns of both sides, after one to warm up (11)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="also a step with compiled blocks; takes a minute or two",
    )
    parser.add_argument(
        "--free-network",
        action="store_true",
        help="only what a sample costs besides the network, at published sizes; takes a minute",
    )
    parser.add_argument(
        "--peer",
        action="append",
        type=parse_checkout,
        default=[],
        metavar="NAME=PATH",
        help="only a step of another library's own loop against ours, compiled as well; NAME is"
        f" {' or '.join(SCRIPTS)}, PATH a checkout of it; takes some minutes",
    )
    parser.add_argument(
        "--write", action="store_true", help="keep the table in benchmarks/results/speed.md"
    )
    arguments = parser.parse_args()
    # process_time adds up the threads: with several it would count waiting ones, too
    torch.set_num_threads(1)
    command = shlex.join(["python", "-m", "benchmarks.speed", *sys.argv[1:]])
    parts = []
    if not (arguments.peer or arguments.free_network):
        times = measure_cases(list_cases(arguments.compile), arguments.repeat)
        parts.append(format_report(times, arguments.repeat))
    if arguments.peer:
        times = measure_cases(list_peer_cases(dict(arguments.peer)), arguments.repeat)
        parts.append(format_peer_part(times, dict(arguments.peer), arguments.repeat))
    if arguments.free_network or not arguments.peer:
        parts.append(build_part(command))
    page = RESULTS.read_text()
    for part in parts:
        print(part)
        page = replace_part(page, part)
    if arguments.write:
        RESULTS.write_text(page)


def measure_cases(cases: Iterable[Case], repeat: int) -> dict[Case, MedianTimes]:
    times_by_case = {}
    for case in tqdm(cases, unit="case"):
        times_by_case[case] = time_both_sides(case.call, case.other, repeat)
        tqdm.write(f"{case.name}: {times_by_case[case].ratio:.3f}")
    return times_by_case


def list_cases(compiled: bool) -> Iterator[Case]:
    """Every row of the table."""
    for name, bench in build_benches().items():
        yield Case(f"rollouts ÷ bare forwards: {name}", "≤ 1.05", *build_rollout_sides(bench))
        policy = Policy(bench.model, PolicyConfig(train="full"), 0)
        yield Case(
            f"update ÷ bare forward, backward and AdamW: {name}",
            "≤ 1.10",
            *build_update_sides(bench, policy),
        )
    for trained in (TRAINED, EVERY):
        name = f"a step of flow_grpo on {len(trained)} of {STEPS} steps ÷ with reused passes: glyph"
        yield Case(
            name,
            "",
            build_policy_gradient_step(build_glyph(), trained),
            build_policy_gradient_step(build_glyph(), trained, reuse=True),
        )
    # Each side has a model of its own: merged or compiled weights would change the other side.
    plain = build_step(build_glyph())
    yield Case(
        "a step of rwr ÷ with merged LoRA in rollouts: glyph",
        "",
        plain,
        build_step(build_glyph(), merged=True),
    )
    if compiled:
        best = build_step(build_compiled_glyph(), merged=True)
        yield Case(
            "a step of rwr ÷ with merged LoRA and compiled blocks: glyph", "≥ 1.5", plain, best
        )
        plain = build_policy_gradient_step(build_glyph(), EVERY)
        best = build_policy_gradient_step(build_compiled_glyph(), EVERY, reuse=True)
        name = (
            f"a step of flow_grpo on {len(EVERY)} of {STEPS} steps ÷ with reused passes and"
            " compiled blocks: glyph"
        )
        yield Case(name, "≥ 1.5", plain, best)


def build_benches() -> dict[str, Bench]:
    """The models by name, with new weights."""
    torch.manual_seed(0)
    # From a network of milliseconds, where our own work shows most, to one that resembles real
    # ones.
    return {
        "glyph": build_glyph(),
        "tiny SD3 with guidance": _build_random_model(SIZES["tiny"], 48, 16, GUIDANCE),
        "wide SD3": _build_random_model(WIDE, 4, 4, 1.0),
    }


def build_glyph() -> Bench:
    model = build_glyph_model(GlyphTrainingConfig())
    model.transformer.requires_grad_(False).eval()
    with torch.no_grad():
        return Bench(model, model.encode_texts(["ABCD", "EFGH", "IJKL", "MNOP"] * 6), 24)


def build_compiled_glyph() -> Bench:
    bench = build_glyph()
    compile_blocks(bench.model)
    return bench


def _build_random_model(size: ModelSize, count: int, rows: int, guidance: float) -> Bench:
    device = torch.device("cpu")
    return Bench(
        build_random_model(size, device, "float32"),
        generate_random_prompts(size, count, guidance, device, torch.float32),
        rows,
    )


def build_rollout_sides(bench: Bench) -> tuple[Call, Call]:
    """A recorded rollout of the stage, and its forward passes alone."""

    def run_ours() -> None:
        generate_samples(
            bench.model,
            bench.prompts,
            bench.sample_keys,
            STAGE.sampler,
            Plan(TRAINED, TRAINED),
            bench.rows,
        )

    # built once, outside of what is timed: the bare side has the network and nothing else
    inputs = build_network_inputs(bench.model, bench.prompts.select_rows(slice(bench.rows)))

    @torch.no_grad()
    def run_bare() -> None:
        for _ in range(STEPS * (len(bench.prompts) // bench.rows)):
            bench.model.transformer(**inputs, return_dict=False)

    return run_ours, run_bare


def build_update_sides(bench: Bench, policy: Policy, passes: int = 4) -> tuple[Call, Call]:
    """Build updates of the stage, and forward, squared error, backward and AdamW on the same rows
    in as many passes.

    A call takes as many updates as it takes until the drift watch has its turn once.
    """
    updater = PolicyUpdater(policy, STAGE)
    batch = build_training_batch(bench)
    slices = split_into_passes(batch.group_index, passes)
    optimizer = build_optimizer(policy, STAGE.optimizer)
    inputs = [
        (
            build_network_inputs(
                bench.model,
                batch.inputs.model_arguments(part)[2],
                *batch.inputs.model_arguments(part)[:2],
            ),
            part,
        )
        for part in slices
    ]

    # the first updates of a stage are all watched; the later ones are what a stage consists of
    updater.updates = WATCHED_FIRST

    def run_ours() -> None:
        for _ in range(WATCHED_EVERY):
            updater.update_policy(batch, passes)

    def run_bare() -> None:
        for _ in range(WATCHED_EVERY):
            for arguments, part in inputs:
                velocity = bench.model.transformer(**arguments, return_dict=False)[0]
                target = batch.next_latents[part]
                # a guided prediction has two rows for each row of the target
                torch.nn.functional.mse_loss(
                    velocity, target.repeat(len(velocity) // len(target), 1, 1, 1)
                ).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run_ours, run_bare


def build_training_batch(bench: Bench) -> TrajectoryBatch:
    """Build the rows of one update: all trained steps of a rollout, with random advantages."""
    # Advantages are numbers only, so random ones cost the same as real ones and need no reward.
    rollouts = generate_samples(
        bench.model,
        bench.prompts,
        bench.sample_keys,
        STAGE.sampler,
        Plan(TRAINED, TRAINED),
        bench.rows,
    )
    assert rollouts.trajectory
    advantage = torch.randn(len(bench.sample_keys))
    return build_trajectory_batch(
        rollouts.trajectory,
        bench.prompts,
        advantage,
        bench.sample_keys,
        STAGE.sampler,
    )


def build_network_inputs(
    model: Model, prompts: Conditioning, latents: Tensor | None = None, sigma: Tensor | None = None
) -> dict[str, Tensor]:
    """Build the arguments of the transformer, both halves of a guided prediction in one pass.

    Shapes, for N prompts and twice as many rows with guidance: hidden_states [2N, C, H, W],
    timestep [2N] in 0 to 1000, encoder_hidden_states [2N, tokens, width].
    """
    halves = [prompts] if prompts.negative is None else [prompts.negative, prompts]
    latents = torch.randn(len(prompts), *model.latent_shape) if latents is None else latents
    sigma = torch.full((len(prompts),), 0.5) if sigma is None else sigma
    return {
        "hidden_states": torch.cat([latents] * len(halves)),
        "timestep": 1000 * torch.cat([sigma] * len(halves)),
        "encoder_hidden_states": torch.cat([half["embeds"] for half in halves]),
        "pooled_projections": torch.cat([half["pooled"] for half in halves]),
    }


def build_step(bench: Bench, merged: bool = False, passes: int = 4) -> Call:
    """A rollout without a recorded trajectory and an update of adapters on its samples (RWR),
    rewards left out.
    """
    policy = Policy(bench.model, PolicyConfig(train="lora", rank=8), 0)
    updater = PolicyUpdater(policy, FORWARD_STAGE)
    sampler = SamplerConfig(name="ode", steps=STEPS)
    advantage = torch.ones(len(bench.sample_keys))
    alone = np.arange(len(bench.sample_keys))  # each sample is a group of its own

    def take_step() -> None:
        with policy.merge_adapters() if merged else nullcontext():
            clean = generate_samples(
                bench.model, bench.prompts, bench.sample_keys, sampler, micro_batch=bench.rows
            ).latents
        rows = build_forward_batch(
            clean,
            bench.prompts,
            advantage,
            bench.sample_keys,
            alone,
            updater.hyper,
            updater.sampler_sigmas,
            visit=0,
        )
        updater.update_policy(rows, passes)

    return take_step


def build_policy_gradient_step(bench: Bench, trained: tuple[int, ...], reuse: bool = False) -> Call:
    """A recorded rollout and an update of adapters on its steps (Flow-GRPO), in passes of as many
    rows, rewards left out.
    """
    policy = Policy(bench.model, PolicyConfig(train="lora", rank=8), 0)
    updater = PolicyUpdater(policy, STAGE)
    advantage = torch.randn(len(bench.sample_keys))
    plan = Plan(trained, trained)

    def take_step() -> None:
        rollouts = generate_samples(
            bench.model,
            bench.prompts,
            bench.sample_keys,
            STAGE.sampler,
            plan,
            bench.rows,
            with_graph=reuse,
        )
        assert rollouts.trajectory
        rows = build_trajectory_batch(
            rollouts.trajectory,
            bench.prompts,
            advantage,
            bench.sample_keys,
            STAGE.sampler,
        )
        if reuse:
            rows = reuse_rollout_forward(rows, np.arange(len(rows.inputs)), rollouts.velocities)
        updater.update_policy(rows, len(rows.inputs) // bench.rows)

    return take_step


def time_both_sides(call: Call, other: Call, repeat: int) -> MedianTimes:
    """Time both in turns, after a call of each to warm up."""
    call()
    other()
    # Whichever is second finds warmer caches, so the order alternates. The ratio of a turn compares
    # calls that are seconds apart: a slow minute of the machine slows both.
    turns = []
    for turn in range(repeat):
        if turn % 2:
            turns.append((measure_cpu_seconds(call), measure_cpu_seconds(other)))
        else:
            turns.append((measure_cpu_seconds(other), measure_cpu_seconds(call))[::-1])
    return MedianTimes(
        median(one / two for one, two in turns),
        *(median(side) for side in zip(*turns, strict=True)),
    )


def measure_cpu_seconds(call: Call) -> float:
    """Measure a call in CPU-seconds of this process, which other processes do not change."""
    start = time.process_time()
    call()
    return time.process_time() - start


if __name__ == "__main__":
    main()
