"""A step of other libraries' own loops against ours: ``python -m benchmarks.speed --peer NAME=PATH
[--write]``, where PATH is a checkout of the library.

A step is a rollout of all samples, their advantages and one optimiser step; both sides have the
same network, the same adapters and batches of the same size, on one thread. The functions are those
of the checkout's training script, called as the script calls them:

    flow_grpo      scripts/train_sd3.py (``general_ocr_sd3`` of config/grpo.py, without its KL):
                   pipeline_with_logprob, compute_log_prob, PerPromptStatTracker; accelerate
                   accumulates, clips and steps
    diffusion_nft  scripts/train_nft_sd3.py (``sd3_pickscore`` of config/nft.py):
                   pipeline_with_logprob, PerPromptStatTracker, return_decay

What stands inline in the script's ``main`` is written here with the same operations: putting the
samples of a rollout together and in random order, the loss, and of DiffusionNFT the blend of the
old adapters. Left out of both sides: text encoders, the VAE and rewards (random numbers stand for
them), which are networks of their own. Left out of the peer's alone: logging, the averages of its
losses, EMA, data-parallel wrappers and loss scaling. Its mixed precision is for GPUs; both sides
compute in float32.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_sides import generate_random_prompts
from benchmarks.machine import describe_commit, describe_machine
from benchmarks.peer_loops import (
    ALPHA,
    LEARNING_RATE,
    PEER_SIZES,
    RANK,
    STEPS,
    TRAINED,
    PeerSize,
    build_diffusion_nft_step,
    build_flow_grpo_step,
    build_model,
    load_script,
)
from benchmarks.speed_report import Call, Case, MedianTimes, format_rows
from ebbflow.algorithms.advantages import compute_advantages
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan
from ebbflow.models.base import Conditioning, Model
from ebbflow.models.compile import compile_blocks
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.rollouts.generate import generate_samples
from ebbflow.training.batches import build_forward_batch, build_trajectory_batch
from ebbflow.training.policy import Policy
from ebbflow.training.rollout_forward import reuse_rollout_forward
from ebbflow.training.update import PolicyUpdater

HEADING = "## Peers' own loops"
WANTED = 2.0
"""How many times as fast our best settings should be."""

NOTES = (
    "A step is a rollout, its advantages and one optimiser step with the same network, adapters of"
    " the same rank and batches of the same size; the functions are those of the library's training"
    " script, and the docstring of `benchmarks/peers.py` says what is left out. flow_grpo trains 9"
    " of 10 steps with guidance and no KL; our best settings for it reuse the rollout's forward"
    " passes, take no gradient through the negative prompts (`negative_gradient: false`) and"
    " compile the blocks. flow_grpo detaches the negative prompts' half of a pass too, and computes"
    " its backward pass, in which the gradient is zero; with our defaults it is not zero."
    " In forward passes f and backward passes b of one half, their step is 38 f + 18 b and ours"
    " 20 f + 9 b: saved passes alone make it 1.9 to 2 times as fast."
    " DiffusionNFT has 9 noise levels and a reference; our best settings for it compile the blocks."
    " What is left there is mostly forward and backward passes; the network of two blocks and 512"
    " channels is nearly all matrix products, which compiling does not make faster."
)


class OurSide:
    """A policy, its updater and the samples of a step.

    Args:
        compiled: compile the blocks of the network.
    """

    def __init__(
        self, stage: OnlineStageConfig, size: PeerSize, prompts: Conditioning, compiled: bool
    ) -> None:
        self.size = size
        self.prompts = prompts
        self.model: Model = build_model(size)
        if compiled:
            compile_blocks(self.model)
        self.policy = Policy(self.model, PolicyConfig(train="lora", rank=RANK, alpha=ALPHA), 0)
        self.updater = PolicyUpdater(self.policy, stage)
        self.prompt_ids = np.repeat(np.arange(size.prompts), size.group_size)
        samples = [sample for _ in range(size.prompts) for sample in range(size.group_size)]
        self.keys = SampleKeys(0, self.prompt_ids.tolist(), samples)

    def compute_advantages(self) -> Tensor:
        """Compute advantages [N] of random rewards."""
        result = compute_advantages(
            {"reward": np.random.default_rng().random(self.size.images)},
            {"reward": 1.0},
            self.prompt_ids,
            self.updater.stage.advantages,
        )
        return torch.from_numpy(result.values)


def build_our_flow_grpo_step(size: PeerSize, prompts: Conditioning, best: bool) -> Call:
    """Build a step of Flow-GRPO in our loop; the best settings reuse the rollout's forward passes,
    take no gradient through the negative prompts, as the peer takes none, and compile the blocks.
    """
    stage = OnlineStageConfig.model_validate(
        {
            "algorithm": {"name": "flow_grpo", "clip_range": 1e-4},
            "sampler": {"name": "flow_sde", "steps": STEPS},
            "window": {"kind": "fixed", "size": TRAINED},
            "reference": {"weight": 0.0},
            "optimizer": {"lr": LEARNING_RATE, "weight_decay": 1e-4},
        }
    )
    side = OurSide(stage, size, prompts, compiled=best)
    trained = tuple(range(TRAINED))
    prompts = replace(prompts, negative_gradient=not best)

    def take_step() -> None:
        side.updater.start_rollout()
        rollouts = generate_samples(
            side.model,
            prompts,
            side.keys,
            stage.sampler,
            # Every step but the last has noise, as every step of the peer's has.
            Plan(trained, trained),
            size.batch,
            with_graph=best,
        )
        assert rollouts.trajectory
        rows = build_trajectory_batch(
            rollouts.trajectory, prompts, side.compute_advantages(), side.keys, stage.sampler
        )
        if best:
            rows = reuse_rollout_forward(rows, np.arange(len(rows.inputs)), rollouts.velocities)
        side.updater.update_policy(rows, len(rows.inputs) // size.batch)
        side.updater.finish_step()

    return take_step


def build_our_diffusion_nft_step(size: PeerSize, prompts: Conditioning, best: bool) -> Call:
    """Build a step of DiffusionNFT in our loop; the best settings compile the blocks."""
    stage = OnlineStageConfig.model_validate(
        {
            "algorithm": {"name": "diffusion_nft", "noise_levels": TRAINED},
            "sampler": {"name": "dpm_solver", "steps": STEPS},
            "reference": {"weight": 1e-4},
            "optimizer": {"lr": LEARNING_RATE, "weight_decay": 1e-4},
        }
    )
    side = OurSide(stage, size, prompts, compiled=best)
    side.policy.ensure_copy("old")
    visits = 0

    def take_step() -> None:
        nonlocal visits
        side.updater.start_rollout()
        # Rollouts of samples without a trajectory have merged adapters in our loop, always.
        with side.policy.use_copy("old"), side.policy.merge_adapters():
            clean = generate_samples(
                side.model, prompts, side.keys, stage.sampler, micro_batch=size.batch
            ).latents
        rows = build_forward_batch(
            clean,
            prompts,
            side.compute_advantages(),
            side.keys,
            np.arange(size.images),  # each sample is a group of its own
            side.updater.hyper,
            side.updater.sampler_sigmas,
            visit=visits,
        )
        side.updater.update_policy(rows, len(rows.inputs) // size.batch)
        side.updater.finish_step()
        visits += 1

    return take_step


# The rows of the page.

BUILDERS = {
    "flow_grpo": (4.5, build_flow_grpo_step, build_our_flow_grpo_step),
    "diffusion_nft": (1.0, build_diffusion_nft_step, build_our_diffusion_nft_step),
}
"""Of each library: the guidance of its settings, its side, our side."""


def list_peer_cases(checkouts: Mapping[str, Path]) -> Iterator[Case]:
    """Every row: a step of each library against ours, with our defaults and our best settings."""
    for name, checkout in checkouts.items():
        script = load_script(name, checkout)
        guidance, build_theirs, build_ours = BUILDERS[name]
        for label, size in PEER_SIZES.items():
            prompts = generate_random_prompts(
                size.network, size.images, guidance, torch.device("cpu"), torch.float32
            )
            # One side of theirs for both rows; ours are built anew, as compiling changes models.
            theirs = build_theirs(script, size, prompts)
            for best in (False, True):
                settings = "with our best settings" if best else "with our defaults"
                yield Case(
                    f"a step of {name} ÷ ours {settings}: {label}",
                    f"≥ {WANTED:g}" if best else "",
                    theirs,
                    build_ours(size, prompts, best),
                )


def format_peer_part(
    times_by_case: Mapping[Case, MedianTimes], checkouts: Mapping[str, Path], repeat: int
) -> str:
    """Format the part of the page."""
    paths = " ".join(f"--peer {name}=PATH" for name in checkouts)
    commits = " and ".join(
        f"{name} at {read_commit(checkout)}" for name, checkout in checkouts.items()
    )
    lines = [
        HEADING,
        "",
        (
            f"Written by `python -m benchmarks.speed {paths} --repeat {repeat} --write` at commit"
            f" {describe_commit()}, with {commits}: medians over {repeat} turns in CPU-seconds of"
            f" one thread of {describe_machine()['cpu']}. A ratio is the median of those of the"
            " turns, not of the two medians beside it: a loaded machine moves both sides of a turn."
            f" {NOTES}"
        ),
        "",
        *format_rows(times_by_case),
    ]
    return "\n".join(lines) + "\n"


def read_commit(checkout: Path) -> str:
    """Read the commit of a checkout, for people; one without git has none."""
    answer = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return answer.stdout.strip() or "an unknown commit"
