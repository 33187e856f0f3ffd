"""The training loops of other libraries, from a checkout of each: their sides of
``benchmarks.peers``, whose docstring says what is called and what is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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

from benchmarks.gpu_sides import SIZES, WIDE, ModelSize, build_random_model
from benchmarks.speed_report import Call
from ebbflow.models.base import Conditioning
from ebbflow.models.pipeline import JOINT_ATTENTION

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


def build_model(size: PeerSize) -> Any:
    """Build our adapter with random weights, the same for every side."""
    torch.manual_seed(0)
    return build_random_model(size.network, torch.device("cpu"), "float32")


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
