"""What ``benchmarks.gpu`` builds, and what this library (ours) and plain diffusers (the peer) do
with it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import Tensor

from ebbflow.flow.noise import SampleKeys, generate_noise
from ebbflow.flow.windows import plan_steps
from ebbflow.models.base import DTYPES, Conditioning
from ebbflow.models.families.sd3 import SD3Model
from ebbflow.recipe.model import ModelConfig, Precision
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.rollouts.generate import Rollouts, generate_samples
from ebbflow.training.batches import TrajectoryBatch, build_trajectory_batch

STEPS = 10
"""Denoising steps of a rollout, as Flow-GRPO trains SD3.5."""
LORA = PolicyConfig(train="lora", rank=32, alpha=32)
STAGE = OnlineStageConfig.model_validate(
    {
        "algorithm": {"name": "flow_grpo", "clip_range": 1e-3},
        "sampler": {"name": "flow_sde", "steps": STEPS},
        "window": {"kind": "fixed", "size": 3},
        "reference": {"weight": 0.0, "penalty": "kl"},  # the plain loop has none
        # Both sides train the same adapters many times over, which must not lead anywhere.
        "optimizer": {"lr": 1e-6, "weight_decay": 0.0},
    }
)
"""What ours does; the peer does the part of it that plain diffusers has."""


@dataclass(frozen=True)
class ModelSize:
    """What is built, and how much work it gets.

    Attributes:
        transformer, vae: configurations of diffusers' classes.
        resolution: height and width of the images in pixels.
        tokens: length of the prompt embeddings.
        micro_batches: images per pass of a rollout; every rollout draws as many images as the
            largest has.
        training_micro_batch: rows per forward and backward pass.
        matrix: side of the matrices whose product gives the peak.
    """

    transformer: dict[str, Any]
    vae: dict[str, Any]
    resolution: int
    tokens: int
    micro_batches: tuple[int, ...]
    training_micro_batch: int
    matrix: int


# Shift and scale are those of SD3's VAE; it has no convolutions before and after the quantisation.
VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "shift_factor": 0.0609,
    "scaling_factor": 1.5305,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
SIZES = {
    # The published configuration of Stable Diffusion 3.5 medium; prompts of 77 CLIP and 256 T5
    # tokens.
    "medium": ModelSize(
        transformer={
            "sample_size": 128,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 24,
            "num_attention_heads": 24,
            "attention_head_dim": 64,
            "joint_attention_dim": 4096,
            "caption_projection_dim": 1536,
            "pooled_projection_dim": 2048,
            "pos_embed_max_size": 384,
            "dual_attention_layers": tuple(range(13)),
            "qk_norm": "rms_norm",
        },
        vae=VAE
        | {
            "block_out_channels": (128, 256, 512, 512),
            "layers_per_block": 2,
            "latent_channels": 16,
            "sample_size": 1024,
        },
        resolution=512,
        tokens=77 + 256,
        micro_batches=(4, 16),
        training_micro_batch=4,
        matrix=8192,  # large enough to reach the peak, 128 MiB each in bfloat16
    ),
    # The same classes and code paths in a second on a CPU.
    "tiny": ModelSize(
        transformer={
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "joint_attention_dim": 48,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 40,
            "pos_embed_max_size": 48,
            "dual_attention_layers": (0,),
            "qk_norm": "rms_norm",
        },
        vae=VAE
        | {
            "block_out_channels": (8, 8, 16, 16),
            "norm_num_groups": 4,
            "latent_channels": 4,
            "sample_size": 128,
        },
        resolution=64,
        tokens=12,
        micro_batches=(2, 4),
        training_micro_batch=2,
        matrix=512,
    ),
}
# A network whose forward pass takes hundreds of milliseconds instead of some: on it the fixed cost
# of a step must vanish. 77 tokens are those of CLIP.
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
    """Both sides, around one transformer.

    Attributes:
        model: our adapter; its VAE is float32 and comes to the device for the time of its call.
        pipeline: the plain pipeline, all of it in ``precision`` and on the device.
        keys: of the images of a rollout.
        noise: what the pipeline starts from, that of the keys, [N, *latent_shape].
    """

    size: ModelSize
    device: torch.device
    precision: Precision
    model: SD3Model
    pipeline: StableDiffusion3Pipeline
    keys: SampleKeys
    noise: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]


def build_sides(size: ModelSize, device: torch.device, precision: Precision) -> Bench:
    """Build both sides with random weights on the device."""
    # One transformer for both, or its memory would be there twice. The VAE is copied: ours stays in
    # float32.
    model = build_random_model(size, device, precision)
    transformer = model.transformer.to(DTYPES[precision])
    vae = copy.deepcopy(model.pipeline.vae).to(DTYPES[precision])
    pipeline = build_pipeline(transformer, vae)
    pipeline.set_progress_bar_config(disable=True)
    images = max(size.micro_batches)
    keys = SampleKeys(0, list(range(images)), [0] * images)
    # [N, C, H / 8, W / 8]; ours draws it from the keys, the pipeline gets it as latents
    start = generate_noise(model.latent_shape, keys.seed, keys.prompt_ids, keys.samples).to(device)
    return Bench(size, device, precision, model, pipeline, keys, start)


def build_random_model(size: ModelSize, device: torch.device, precision: Precision) -> SD3Model:
    """Our adapter around a float32 pipeline without text encoders; drawn on the device, as a CPU is
    slow to draw billions.
    """
    # under torch.device, so that parameters are created there
    with torch.device(device):
        transformer = SD3Transformer2DModel(**size.transformer)
        vae = AutoencoderKL(**size.vae)
    for part in (transformer, vae):
        part.to(device).requires_grad_(False).eval()
    side = {"height": size.resolution, "width": size.resolution}
    config = ModelConfig(family="sd3", path="random-weights", precision=precision, **side)
    return SD3Model(build_pipeline(transformer, vae), config, device)


def build_pipeline(
    transformer: SD3Transformer2DModel, vae: AutoencoderKL
) -> StableDiffusion3Pipeline:
    # six parts are left out: three text encoders and their tokenizers
    return StableDiffusion3Pipeline(
        transformer, FlowMatchEulerDiscreteScheduler(shift=3.0), vae, *[None] * 6
    )


def generate_random_prompts(
    size: ModelSize, count: int, guidance: float, device: torch.device, dtype: torch.dtype
) -> Conditioning:
    """Generate random embeddings in place of encoded prompts, always the same ones.

    Text encoders would need a download and are a small part of a rollout. ``embeds`` is [count,
    tokens, width], ``pooled`` [count, pooled width].
    """
    # a meta device counts FLOPs and has no generator
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(1)
    width = size.transformer["joint_attention_dim"]
    pooled = size.transformer["pooled_projection_dim"]

    def random_embedding() -> dict[str, Tensor]:
        shapes = {"embeds": (count, size.tokens, width), "pooled": (count, pooled)}
        return {
            name: torch.randn(shape, generator=generator, device=device, dtype=dtype)
            for name, shape in shapes.items()
        }

    return Conditioning(
        random_embedding(), Conditioning(random_embedding()) if guidance > 1 else None, guidance
    )


def select_prompts(bench: Bench, guidance: float) -> Conditioning:
    return generate_random_prompts(bench.size, len(bench.keys), guidance, bench.device, bench.dtype)


# Ours.


def generate_rollout(
    bench: Bench, prompts: Conditioning, rows: int, precision: Precision | None = None
) -> Rollouts:
    """A rollout of the stage, ``rows`` images per pass: a stochastic window, recorded, and
    deterministic steps after it.
    """
    assert STAGE.window
    chosen = plan_steps(STAGE.window, STEPS, optimisation_step=0, seed=0)
    return generate_samples(
        bench.model, prompts, bench.keys, STAGE.sampler, chosen, rows, precision
    )


def build_training_batch(
    bench: Bench, guidance: float, rows: int, precision: Precision | None = None
) -> TrajectoryBatch:
    """The rows of one update on such a rollout, with random advantages."""
    prompts = select_prompts(bench, guidance)
    trajectory = generate_rollout(bench, prompts, rows, precision).trajectory
    assert trajectory
    advantage = torch.randn(len(bench.keys), device=bench.device)
    return build_trajectory_batch(
        trajectory,
        prompts,
        advantage,
        bench.keys,
        STAGE.sampler,
    )


# The peer.


def run_pipeline(
    bench: Bench, prompts: Conditioning, rows: int, output: str, autocast: bool = False
) -> list[Any]:
    """What the pipeline returns for each ``rows`` prompts, called as its users call it.

    ``autocast`` is what diffusers' training scripts put around it while there are float32 adapters
    on a network of less.
    """
    images_of_passes = []
    with enter_autocast(bench, autocast):
        for start in range(0, len(prompts), rows):
            part = slice(start, start + rows)
            images = bench.pipeline(
                **convert_prompts(prompts.select_rows(part)),
                latents=bench.noise[part],
                num_inference_steps=STEPS,
                guidance_scale=prompts.guidance,
                output_type=output,
            ).images
            images_of_passes.append(images)
    return images_of_passes


def convert_prompts(prompts: Conditioning) -> dict[str, Tensor]:
    """Encoded prompts as arguments of the pipeline."""
    arguments = {"prompt_embeds": prompts["embeds"], "pooled_prompt_embeds": prompts["pooled"]}
    if prompts.negative is None:
        return arguments
    return arguments | {
        f"negative_{name}": value for name, value in convert_prompts(prompts.negative).items()
    }


def run_plain_update(
    bench: Bench, optimizer: torch.optim.Optimizer, batch: TrajectoryBatch, rows: int
) -> None:
    """An optimiser step as a plain training script takes it: the same rows through the same
    network, with a squared error.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for start in range(0, len(batch.inputs), rows):
        part = slice(start, start + rows)
        prediction = predict_plainly(bench, *batch.inputs.model_arguments(part))
        loss = torch.nn.functional.mse_loss(prediction.float(), batch.next_latents[part])
        # the mean over all rows, whatever the last pass has
        (loss * len(prediction) / len(batch.inputs)).backward()
    torch.nn.utils.clip_grad_norm_(parameters, STAGE.optimizer.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def predict_plainly(bench: Bench, latents: Tensor, sigma: Tensor, prompts: Conditioning) -> Tensor:
    """The velocity, with guidance as the pipeline computes it: both halves in one pass."""
    halves = [prompts] if prompts.negative is None else [prompts.negative, prompts]
    with enter_autocast(bench):
        prediction = bench.model.transformer(
            hidden_states=torch.cat([latents] * len(halves)),
            timestep=torch.cat([1000 * sigma] * len(halves)),
            encoder_hidden_states=torch.cat([half["embeds"] for half in halves]),
            pooled_projections=torch.cat([half["pooled"] for half in halves]),
            return_dict=False,
        )[0]
    if prompts.negative is None:
        return prediction
    negative, positive = prediction.chunk(2)
    return negative + prompts.guidance * (positive - negative)


def enter_autocast(bench: Bench, wanted: bool = True) -> torch.autocast:
    return torch.autocast(
        bench.device.type, bench.dtype, enabled=wanted and bench.precision != "float32"
    )
