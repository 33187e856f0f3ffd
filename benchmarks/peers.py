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

import argparse
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from accelerate import Accelerator
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig, get_peft_model
from torch import Tensor

from benchmarks.gpu_sides import SIZES, WIDE, ModelSize, build_random_model, generate_random_prompts
from benchmarks.machine import describe_commit, describe_machine
from benchmarks.speed_report import Call, Case, MedianTimes, format_rows
from ebbflow.algorithms.advantages import compute_advantages
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan
from ebbflow.models.base import Conditioning, Model
from ebbflow.models.compile import compile_blocks
from ebbflow.models.pipeline import JOINT_ATTENTION
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.rollouts.generate import generate_samples
from ebbflow.training.batches import build_forward_batch, build_trajectory_batch
from ebbflow.training.policy import Policy
from ebbflow.training.rollout_forward import reuse_rollout_forward
from ebbflow.training.update import PolicyUpdater

HEADING = "## Peers' own loops"
SCRIPTS = {"flow_grpo": "scripts/train_sd3.py", "diffusion_nft": "scripts/train_nft_sd3.py"}
"""The training script of each library, in its checkout."""
UNUSED = ("absl", "ml_collections", "wandb")
"""Packages that the scripts import for their command line and logging, which nothing here calls."""
STEPS = 10
"""Denoising steps of a rollout."""
TRAINED = 9
"""Of these, the steps that are trained: int(.99 STEPS) of ``timestep_fraction``."""
RANK = 32
ALPHA = 64
"""Of the adapters of both scripts."""
LEARNING_RATE = 1e-6
"""The same adapters are trained many times over, and must not lead anywhere."""
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


@dataclass(frozen=True)
class PeerSize:
    """A network and the samples of a step.

    Attributes:
        prompts: different ones.
        group_size: images of each.
        batch: images of a forward pass; divides prompts * group_size.
    """

    network: ModelSize
    prompts: int
    group_size: int
    batch: int

    @property
    def images(self) -> int:
        return self.prompts * self.group_size


PEER_SIZES = {
    "tiny SD3": PeerSize(SIZES["tiny"], 4, 12, 16),
    "wide SD3": PeerSize(WIDE, 2, 4, 4),
}


def parse_checkout(text: str) -> tuple[str, Path]:
    """Read NAME=PATH of the command line.

    Raises:
        argparse.ArgumentTypeError: no such library, or the folder has no training script.
    """
    name, _, path = text.partition("=")
    if name not in SCRIPTS:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be NAME=PATH with one of the names {', '.join(SCRIPTS)}"
        )
    if not (Path(path) / SCRIPTS[name]).is_file():
        raise argparse.ArgumentTypeError(
            f"{path!r} has no {SCRIPTS[name]}; give the folder of a checkout of {name}"
        )
    return name, Path(path)


def load_script(name: str, checkout: Path) -> ModuleType:
    """Import the training script of a checkout, without running it."""
    # By its path: "scripts" is no package of theirs, and may be one of somebody else's.
    spec = importlib.util.spec_from_file_location(f"peer_{name}", checkout / SCRIPTS[name])
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    with _import_from(checkout):
        spec.loader.exec_module(script)
    return script


@contextmanager
def _import_from(checkout: Path) -> Iterator[None]:
    """Import from a checkout inside the block; both libraries call their package ``flow_grpo``."""
    modules = dict(sys.modules)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    # First, so that a package of the same name that is installed is not taken for it.
    sys.path.insert(0, str(checkout))
    for name in UNUSED:
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = MagicMock()
    try:
        yield
    finally:
        # Functions keep the modules that they need; the next checkout imports its own.
        sys.path.remove(str(checkout))
        for name in sys.modules.keys() - modules.keys():
            if name.partition(".")[0] in ("flow_grpo", *UNUSED):
                del sys.modules[name]
        root.handlers[:] = handlers  # a script configures logging when it is imported
        root.setLevel(level)


# The peers' sides.


def build_peer_pipeline(size: PeerSize) -> StableDiffusion3Pipeline:
    """Build their pipeline, with the first weights of our side and adapters as both scripts add
    them.
    """
    pipeline = build_model(size).pipeline
    pipeline.set_progress_bar_config(disable=True)
    # The pipeline decodes what it generates; a VAE as small as this network would be half of a
    # step, and is a twentieth of it at real sizes.
    pipeline.vae.decode = lambda latents, return_dict: (latents[:, :3],)
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, init_lora_weights="gaussian", target_modules=JOINT_ATTENTION
    )
    pipeline.transformer = get_peft_model(pipeline.transformer, config)
    return pipeline


def build_optimizer_as_they_do(parameters: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    # Not fused: theirs is torch's default.
    return torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, betas=(0.9, 0.999), weight_decay=1e-4, eps=1e-8
    )


def list_trained_parameters(network: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


def compute_their_advantages(tracker: Any, size: PeerSize, rewards: Tensor) -> Tensor:
    """Compute advantages [N, TRAINED]: both scripts repeat a reward for each trained step."""
    names = np.repeat([f"prompt {number}" for number in range(size.prompts)], size.group_size)
    repeated = rewards.unsqueeze(1).repeat(1, TRAINED)
    # Float64, as the tracker computes them; the losses of both scripts are float64 from there on.
    advantages = torch.as_tensor(tracker.update(names, repeated.numpy()))
    tracker.clear()
    return advantages


def run_their_pipeline(
    script: Any,
    pipeline: StableDiffusion3Pipeline,
    size: PeerSize,
    prompts: Conditioning,
    **arguments: Any,
) -> dict[str, Tensor]:
    """Generate all images of a step with ``pipeline_with_logprob``, batch by batch, and put what
    the scripts keep of the batches together, [N, ...] each.
    """
    batches = []
    for start in range(0, size.images, size.batch):
        rows = prompts.select_rows(slice(start, start + size.batch))
        # Without guidance the pipeline does not look at negative prompts.
        negative = rows.negative or rows
        with torch.no_grad():
            _, latents, log_probs = script.pipeline_with_logprob(
                pipeline,
                prompt_embeds=rows["embeds"],
                pooled_prompt_embeds=rows["pooled"],
                negative_prompt_embeds=negative["embeds"],
                negative_pooled_prompt_embeds=negative["pooled"],
                num_inference_steps=STEPS,
                guidance_scale=prompts.guidance,
                output_type="pt",
                height=size.network.resolution,
                width=size.network.resolution,
                **arguments,
            )
        batch = {
            "prompt_embeds": rows["embeds"],
            "pooled_prompt_embeds": rows["pooled"],
            "timesteps": pipeline.scheduler.timesteps.repeat(size.batch, 1),
            "latents": torch.stack(latents, dim=1),  # [n, STEPS + 1, C, H, W]
        }
        # A deterministic solver has none.
        if log_probs[0] is not None:
            batch["log_probs"] = torch.stack(log_probs, dim=1)
        batches.append(batch)
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def shuffle_into_batches(samples: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Shuffle the samples and cut them into batches of ``count``."""
    order = torch.randperm(len(samples["timesteps"]))
    shuffled = {key: value[order] for key, value in samples.items()}
    return [
        {key: value[start : start + count] for key, value in shuffled.items()}
        for start in range(0, len(order), count)
    ]


def build_flow_grpo_step(script: Any, size: PeerSize, prompts: Conditioning) -> Call:
    """Build a step as ``main`` of flow_grpo's scripts/train_sd3.py takes it."""
    pipeline = build_peer_pipeline(size)
    train = SimpleNamespace(
        cfg=prompts.negative is not None, adv_clip_max=5, clip_range=1e-4, max_grad_norm=1.0
    )
    sample = SimpleNamespace(guidance_scale=prompts.guidance, noise_level=0.7)
    config = SimpleNamespace(sample=sample, train=train)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=size.images // size.batch * TRAINED
    )
    transformer, optimizer = accelerator.prepare(
        pipeline.transformer,
        build_optimizer_as_they_do(list_trained_parameters(pipeline.transformer)),
    )
    tracker = script.PerPromptStatTracker(True)

    def take_step() -> None:
        pipeline.transformer.eval()
        samples = run_their_pipeline(
            script, pipeline, size, prompts, noise_level=config.sample.noise_level
        )
        # The latents before and after each step, [N, STEPS, C, H, W] each.
        latents = samples.pop("latents")
        samples |= {"latents": latents[:, :-1], "next_latents": latents[:, 1:]}
        samples["advantages"] = compute_their_advantages(tracker, size, torch.rand(size.images))
        pipeline.transformer.train()
        for batch in shuffle_into_batches(samples, size.batch):
            embeds, pooled = batch["prompt_embeds"], batch["pooled_prompt_embeds"]
            if prompts.negative is not None:
                # All negative prompts are the empty one there, so that they need no shuffling.
                rows = slice(len(embeds))
                embeds = torch.cat([prompts.negative["embeds"][rows], embeds])
                pooled = torch.cat([prompts.negative["pooled"][rows], pooled])
            for step in range(TRAINED):
                # Gradients add up over all steps of all batches; the last pass clips and steps.
                with accelerator.accumulate(transformer):
                    _, log_prob, _, _ = script.compute_log_prob(
                        transformer, pipeline, batch, step, embeds, pooled, config
                    )
                    loss = compute_clipped_loss(batch, step, log_prob, train)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(transformer.parameters(), train.max_grad_norm)
                    optimizer.step()
                    optimizer.zero_grad()

    return take_step


def compute_clipped_loss(
    batch: Mapping[str, Tensor], step: int, log_prob: Tensor, train: SimpleNamespace
) -> Tensor:
    """Compute the loss that stands in ``main`` of flow_grpo's script."""
    advantages = torch.clamp(batch["advantages"][:, step], -train.adv_clip_max, train.adv_clip_max)
    ratio = torch.exp(log_prob - batch["log_probs"][:, step])
    clipped = torch.clamp(ratio, 1.0 - train.clip_range, 1.0 + train.clip_range)
    return torch.mean(torch.maximum(-advantages * ratio, -advantages * clipped))


def build_diffusion_nft_step(script: Any, size: PeerSize, prompts: Conditioning) -> Call:
    """Build a step as ``main`` of DiffusionNFT's scripts/train_nft_sd3.py takes it."""
    pipeline = build_peer_pipeline(size)
    network = pipeline.transformer
    # Two sets of adapters on one network: the script switches between them for each prediction.
    network.add_adapter("old", network.peft_config["default"])
    parameters = {}
    for adapter in ("default", "old"):
        network.set_adapter(adapter)
        parameters[adapter] = list_trained_parameters(network)
    network.set_adapter("default")
    for current, old in zip(parameters["default"], parameters["old"], strict=True):
        old.data.copy_(current.detach().data)
    optimizer = build_optimizer_as_they_do(parameters["default"])
    tracker = script.PerPromptStatTracker(True)
    num_passes = size.images // size.batch * TRAINED
    steps_taken = 0

    def take_step() -> None:
        nonlocal steps_taken
        network.eval()
        network.set_adapter("old")
        samples = run_their_pipeline(
            script, pipeline, size, prompts, deterministic=True, solver="dpm2", model_type="sd3"
        )
        network.set_adapter("default")
        samples["latents_clean"] = samples.pop("latents")[:, -1]
        samples["advantages"] = compute_their_advantages(tracker, size, torch.rand(size.images))
        # The trained steps of each sample in an order of its own.
        order = torch.stack([torch.randperm(STEPS) for _ in range(size.images)])
        samples["timesteps"] = samples["timesteps"].gather(1, order)
        network.train()
        for batch in shuffle_into_batches(samples, size.batch):
            for step in range(TRAINED):
                (compute_nft_loss(network, batch, step) / num_passes).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps_taken += 1
        # Kind 1: .001 more at each step, up to .5.
        decay = script.return_decay(steps_taken, 1)
        with torch.no_grad():
            for current, old in zip(parameters["default"], parameters["old"], strict=True):
                old.data.copy_(old.detach().data * decay + current.detach().clone() * (1.0 - decay))

    return take_step


def compute_nft_loss(network: Any, batch: Mapping[str, Tensor], step: int) -> Tensor:
    """Compute the loss that stands in ``main`` of DiffusionNFT's script, with its beta of 1 and its
    1e-4 of the distance to the base model.
    """
    beta, clip = 1.0, 5
    clean = batch["latents_clean"]
    timestep = batch["timesteps"][:, step]
    t = (timestep / 1000.0).view(-1, 1, 1, 1)
    noised = (1 - t) * clean + t * torch.randn_like(clean.float())

    def predict() -> Tensor:
        prediction: Tensor = network(
            hidden_states=noised,
            timestep=timestep,
            encoder_hidden_states=batch["prompt_embeds"],
            pooled_projections=batch["pooled_prompt_embeds"],
            return_dict=False,
        )[0]
        return prediction

    # Three predictions at the same points, one of them with gradient.
    network.set_adapter("old")
    with torch.no_grad():
        old = predict()
    network.set_adapter("default")
    current = predict()
    with torch.no_grad(), network.disable_adapter():
        base = predict()
    network.set_adapter("default")

    def compute_error(velocity: Tensor) -> Tensor:
        error = noised - t * velocity - clean
        with torch.no_grad():
            weight = error.double().abs().mean(dim=(1, 2, 3), keepdim=True).clip(min=0.00001)
        return (error**2 / weight).mean(dim=(1, 2, 3))

    advantages = torch.clamp(batch["advantages"][:, step], -clip, clip)
    preference = torch.clamp(advantages / clip / 2.0 + 0.5, 0, 1)
    better = compute_error(beta * current + (1 - beta) * old)
    worse = compute_error((1.0 + beta) * old - beta * current)
    contrast = preference * better / beta + (1.0 - preference) * worse / beta
    distance = ((current - base) ** 2).mean(dim=(1, 2, 3))
    return (contrast * clip).mean() + 1e-4 * distance.mean()


# Our sides.


def build_model(size: PeerSize) -> Any:
    """Build our adapter with random weights, the same for every side."""
    torch.manual_seed(0)
    return build_random_model(size.network, torch.device("cpu"), "float32")


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
