"""CPU-seconds of rollouts and updates against bare torch: ``python -m benchmarks.speed [--compile]
[--write]``.

A rollout is compared with its forward passes alone: the same network on as many rows as often, with
all inputs ready. An update without reference and copies is compared with forward, squared error,
backward and the same AdamW, without clipping, metrics and checks. A step with our best settings is
compared with the same step without them. Both sides take turns in one process, and each is first in
every other turn; the ratio is the median over the turns, so that other work on the machine cancels
out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.gpu_sides import SIZES, Size, random_model, random_prompts
from benchmarks.speed_report import Call, Case, Measured, report
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan
from ebbflow.models.base import Conditioning, Model
from ebbflow.models.compile import compile_blocks
from ebbflow.models.families.glyph import new_glyph
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.model import GlyphTrainingConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.rollouts.generate import generate
from ebbflow.stage import WATCHED_EVERY, WATCHED_FIRST
from ebbflow.training.batches import (
    CorrectedRollout,
    TrajectoryBatch,
    forward_batch,
    parts,
    trajectory_batch,
)
from ebbflow.training.optimizer import make_optimizer
from ebbflow.training.policy import Policy
from ebbflow.training.rollout_forward import reuse_rollout_forward
from ebbflow.training.update import PolicyUpdater

RESULTS = Path(__file__).parent / "results" / "speed.md"
STEPS = 10
FORWARD_STAGE = OnlineStageConfig.model_validate(
    {
        "algorithm": {"name": "rwr", "noise_levels": 3},
        "sampler": {"name": "ode", "steps": STEPS},
        "reference": {"weight": 0.0},
        "optimizer": {"lr": 1e-6, "weight_decay": 0.0},
    }
)
TRAINED = (1, 2, 3)
EVERY = tuple(range(STEPS - 1))
GUIDANCE = 4.5
STAGE = OnlineStageConfig.model_validate(
    {
        "algorithm": {"name": "flow_grpo", "clip_range": 1e-3},
        "sampler": {"name": "flow_sde", "steps": STEPS},
        "window": {"kind": "fixed", "size": 3},
        "reference": {"weight": 0.0},
        "optimizer": {
            "lr": 1e-6,
            "weight_decay": 0.0,
        },  # the same parameters are trained many times over
    }
)
WIDE = replace(
    SIZES["tiny"],
    transformer=SIZES["tiny"].transformer
    | {
        "num_attention_heads": 8,
        "attention_head_dim": 64,
        "caption_projection_dim": 512,
        "joint_attention_dim": 512,
    },
    tokens=77,
)


@dataclass(frozen=True)
class Bench:
    """A model, the prompts of a rollout, and how many of them are a pass."""

    model: Model
    prompts: Conditioning
    rows: int

    @property
    def keys(self) -> SampleKeys:
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
        "--write", action="store_true", help="keep the table in benchmarks/results/speed.md"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for case in tqdm(cases(arguments.compile), unit="case"):
        found[case] = compare(case.call, case.other, arguments.repeat)
        tqdm.write(f"{case.name}: {found[case].ratio:.3f}")
    page = report(found, arguments.repeat)
    print(page)
    if arguments.write:
        RESULTS.write_text(page)


def cases(compiled: bool) -> Iterator[Case]:
    """Every row of the table."""
    for name, bench in benches().items():
        yield Case(f"rollouts ÷ bare forwards: {name}", "≤ 1.05", *rollout_sides(bench))
        policy = Policy(bench.model, PolicyConfig(train="full"), 0)
        yield Case(
            f"update ÷ bare forward, backward and AdamW: {name}",
            "≤ 1.10",
            *update_sides(bench, policy),
        )
    for trained in (TRAINED, EVERY):
        name = f"a step of flow_grpo on {len(trained)} of {STEPS} steps ÷ with reused passes: glyph"
        yield Case(
            name,
            "",
            policy_gradient_step(glyph(), trained),
            policy_gradient_step(glyph(), trained, reuse=True),
        )
    plain = step(glyph())
    yield Case(
        "a step of rwr ÷ with merged LoRA in rollouts: glyph", "", plain, step(glyph(), merged=True)
    )
    if compiled:
        best = step(compiled_glyph(), merged=True)
        yield Case(
            "a step of rwr ÷ with merged LoRA and compiled blocks: glyph", "≥ 1.5", plain, best
        )
        plain = policy_gradient_step(glyph(), EVERY)
        best = policy_gradient_step(compiled_glyph(), EVERY, reuse=True)
        name = (
            f"a step of flow_grpo on {len(EVERY)} of {STEPS} steps ÷ with reused passes and"
            " compiled blocks: glyph"
        )
        yield Case(name, "≥ 1.5", plain, best)


def benches() -> dict[str, Bench]:
    """The models by name, with new weights."""
    torch.manual_seed(0)
    return {
        "glyph": glyph(),
        "tiny SD3 with guidance": _random(SIZES["tiny"], 48, 16, GUIDANCE),
        "wide SD3": _random(WIDE, 4, 4, 1.0),
    }


def glyph() -> Bench:
    model = new_glyph(GlyphTrainingConfig())
    model.transformer.requires_grad_(False).eval()
    with torch.no_grad():
        return Bench(model, model.encode_texts(["ABCD", "EFGH", "IJKL", "MNOP"] * 6), 24)


def compiled_glyph() -> Bench:
    bench = glyph()
    compile_blocks(bench.model)
    return bench


def _random(size: Size, count: int, rows: int, guidance: float) -> Bench:
    device = torch.device("cpu")
    return Bench(
        random_model(size, device, "float32"),
        random_prompts(size, count, guidance, device, torch.float32),
        rows,
    )


def rollout_sides(bench: Bench) -> tuple[Call, Call]:
    """A recorded rollout of the stage, and its forward passes alone."""

    def ours() -> None:
        generate(
            bench.model,
            bench.prompts,
            bench.keys,
            STAGE.sampler,
            Plan(TRAINED, TRAINED),
            bench.rows,
        )

    inputs = network_inputs(bench.model, bench.prompts.rows(slice(bench.rows)))

    @torch.no_grad()
    def bare() -> None:
        for _ in range(STEPS * (len(bench.prompts) // bench.rows)):
            bench.model.transformer(**inputs, return_dict=False)

    return ours, bare


def update_sides(bench: Bench, policy: Policy, passes: int = 4) -> tuple[Call, Call]:
    """Updates of the stage, and forward, squared error, backward and AdamW on the same rows in as
    many passes.

    As many as it takes until the drift watch has its turn once.
    """
    updater = PolicyUpdater(policy, STAGE)
    batch = training_batch(bench)
    slices = parts(batch.group_index, passes)
    optimizer = make_optimizer(policy, STAGE.optimizer)
    inputs = [
        (network_inputs(bench.model, batch.inputs.at(part)[2], *batch.inputs.at(part)[:2]), part)
        for part in slices
    ]

    updater.updates = WATCHED_FIRST  # of a stage; the later ones count

    def ours() -> None:
        for _ in range(WATCHED_EVERY):
            updater.update(batch, passes)

    def bare() -> None:
        for _ in range(WATCHED_EVERY):
            for given, part in inputs:
                velocity = bench.model.transformer(**given, return_dict=False)[0]
                target = batch.next_latents[part]
                torch.nn.functional.mse_loss(
                    velocity, target.repeat(len(velocity) // len(target), 1, 1, 1)
                ).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return ours, bare


def training_batch(bench: Bench) -> TrajectoryBatch:
    """The rows of one update: all trained steps of a rollout, with random advantages."""
    rollouts = generate(
        bench.model, bench.prompts, bench.keys, STAGE.sampler, Plan(TRAINED, TRAINED), bench.rows
    )
    assert rollouts.trajectory
    advantage = torch.randn(len(bench.keys))
    return trajectory_batch(
        CorrectedRollout.nothing(rollouts.trajectory),
        bench.prompts,
        advantage,
        bench.keys,
        STAGE.sampler,
    )


def network_inputs(
    model: Model, prompts: Conditioning, latents: Tensor | None = None, sigma: Tensor | None = None
) -> dict[str, Tensor]:
    """Arguments of the transformer, both halves of a guided prediction in one pass."""
    halves = [prompts] if prompts.negative is None else [prompts.negative, prompts]
    latents = torch.randn(len(prompts), *model.latent_shape) if latents is None else latents
    sigma = torch.full((len(prompts),), 0.5) if sigma is None else sigma
    return {
        "hidden_states": torch.cat([latents] * len(halves)),
        "timestep": 1000 * torch.cat([sigma] * len(halves)),
        "encoder_hidden_states": torch.cat([half["embeds"] for half in halves]),
        "pooled_projections": torch.cat([half["pooled"] for half in halves]),
    }


def step(bench: Bench, merged: bool = False, passes: int = 4) -> Call:
    """A rollout without a recorded trajectory and an update of adapters on its samples (RWR),
    rewards left out.
    """
    policy = Policy(bench.model, PolicyConfig(train="lora", rank=8), 0)
    updater = PolicyUpdater(policy, FORWARD_STAGE)
    sampler = SamplerConfig(name="ode", steps=STEPS)
    advantage = torch.ones(len(bench.keys))
    alone = np.arange(len(bench.keys))

    def take() -> None:
        with policy.merged() if merged else nullcontext():
            clean = generate(
                bench.model, bench.prompts, bench.keys, sampler, micro_batch=bench.rows
            ).latents
        rows = forward_batch(
            clean,
            bench.prompts,
            advantage,
            bench.keys,
            alone,
            updater.hyper,
            updater.schedule,
            visit=0,
        )
        updater.update(rows, passes)

    return take


def policy_gradient_step(bench: Bench, trained: tuple[int, ...], reuse: bool = False) -> Call:
    """A recorded rollout and an update of adapters on its steps (Flow-GRPO), in passes of as many
    rows, rewards left out.
    """
    policy = Policy(bench.model, PolicyConfig(train="lora", rank=8), 0)
    updater = PolicyUpdater(policy, STAGE)
    advantage = torch.randn(len(bench.keys))
    plan = Plan(trained, trained)

    def take() -> None:
        made = generate(
            bench.model,
            bench.prompts,
            bench.keys,
            STAGE.sampler,
            plan,
            bench.rows,
            with_graph=reuse,
        )
        assert made.trajectory
        rows = trajectory_batch(
            CorrectedRollout.nothing(made.trajectory),
            bench.prompts,
            advantage,
            bench.keys,
            STAGE.sampler,
        )
        if reuse:
            rows = reuse_rollout_forward(rows, np.arange(len(rows.inputs)), made.velocities)
        updater.update(rows, len(rows.inputs) // bench.rows)

    return take


def compare(call: Call, other: Call, repeat: int) -> Measured:
    """Both in turns, after a call of each to warm up."""
    call(), other()
    turns = []
    for turn in range(repeat):
        if turn % 2:
            turns.append((cpu_seconds(call), cpu_seconds(other)))
        else:
            turns.append((cpu_seconds(other), cpu_seconds(call))[::-1])
    return Measured(
        median(one / two for one, two in turns),
        *(median(side) for side in zip(*turns, strict=True)),
    )


def cpu_seconds(call: Call) -> float:
    """Of this process, which other processes on the machine do not change."""
    start = time.process_time()
    call()
    return time.process_time() - start


if __name__ == "__main__":
    main()
