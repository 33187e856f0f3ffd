"""What the families with a diffusers pipeline share: the pipeline's own parts, called as the
pipeline calls them.

With the deterministic sampler, the same noise and the same prompt, an adapter's image is the
pipeline's (the tests compare them). The transformer is on the device, text encoders and VAE as
``ebbflow.models.residency`` says.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ebbflow.data.model_sizes import ENCODED_AT_ONCE, PIXELS_AT_ONCE
from ebbflow.data.prompts import Prompt
from ebbflow.flow.host_values import derive
from ebbflow.flow.latents import get_picture_shape
from ebbflow.models.base import Conditioning, ModelError, Tokens
from ebbflow.models.pipeline_loading import ReadsPipeline, load_pipeline
from ebbflow.models.published import Published
from ebbflow.models.residency import parts_on_device
from ebbflow.models.weight_files import PendingWeights
from ebbflow.progress import show_progress
from ebbflow.recipe.model import ModelConfig

JOINT_ATTENTION = [
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
]
"""The attention layers of blocks in which image and text attend to each other; Flow-GRPO
(2505.05470) adapts them.
"""
SHARD = "5GB"
"""Largest file of a saved part."""


class PipelineModel(ReadsPipeline):
    """Adapter of a diffusers pipeline; see ``ebbflow.models.base.Model``. A family overrides what
    differs.

    Attributes:
        device: where the network runs.
        published: the parts of published models, for estimates.
        networks: the pipeline's parts that denoise; one of them is trained.
        text_parts: the pipeline's parts that encode prompts.
        sound_parts: the pipeline's parts that decode sound, of families that generate some.
        default_size: height and width in pixels where the recipe gives none.
        default_max_tokens: longest prompt, in tokens of the large text encoder, where the recipe
            gives none.
        guided: whether ``model.guidance`` is the scale of classifier-free guidance.
        splits_guidance: whether a guided prediction can be had without the gradient of the negative
            prompt's (``Conditioning.negative_gradient``).
        draws_videos: whether ``model.frames`` may be more than one.
        shares_tokens: whether processes can share the tokens of a sample
            (``ebbflow.models.context_parallel``).
        unused_parameters: patterns of the names of parameters that the velocity does not depend on,
            which are never trained.
        pending_weights: of the networks to train, until they are read; missing afterwards.
        runs_without_autocast: whether the network takes inputs in bfloat16 where its weights are in
            it.
        text_multiple: the network gets prompts padded to a multiple of it; 0 where they have one
            length, that of the longest.
    """

    pipeline_class: ClassVar[Any]
    lora_targets: ClassVar[list[str]]
    published: ClassVar[Published] = {}
    networks: ClassVar[tuple[str, ...]] = ("transformer",)
    text_parts: ClassVar[tuple[str, ...]]
    sound_parts: ClassVar[tuple[str, ...]] = ()
    default_size: ClassVar[tuple[int, int]]
    default_max_tokens: ClassVar[int] = 512
    guided: ClassVar[bool] = True
    splits_guidance: ClassVar[bool] = True
    draws_videos: ClassVar[bool] = False
    shares_tokens: ClassVar[bool] = False
    unused_parameters: ClassVar[tuple[str, ...]] = ()
    runs_without_autocast: ClassVar[bool] = True
    text_multiple: int = 0
    pending_weights: PendingWeights

    def __init__(self, pipeline: Any, config: ModelConfig, device: torch.device) -> None:
        if config.frames > 1 and not self.draws_videos:
            raise ModelError(
                f"model.frames = {config.frames}: {config.family} draws images; leave it out, or"
                " take family wan"
            )
        self.pipeline = pipeline
        self.transformer = self._trained_network(pipeline, config)
        self.config = config
        self.device = device
        self.precision = config.precision
        self.height = config.height or self.default_size[0]
        self.width = config.width or self.default_size[1]
        self.max_tokens = config.max_tokens or self.default_max_tokens
        self.latent_shape = self._compute_latent_shape()

    @classmethod
    def load(
        cls, folder: Path, config: ModelConfig, device: torch.device, weights_later: bool = False
    ) -> Self:
        """As ``ebbflow.models.base.Model.load``.

        Args:
            weights_later: the networks to train have no weights yet (``pending_weights``): a policy
                reads those that it keeps.
        """
        pipeline, files = load_pipeline(cls, folder, config, device, weights_later)
        model = cls(pipeline, config, device)
        if files:
            alone = len(files) == 1
            model.pending_weights = PendingWeights(
                {"" if alone else f"{part}.": file for part, file in files.items()}
            )
        if config.gradient_checkpointing:
            model._recompute_activations()
        return model

    def _recompute_activations(self) -> None:
        """Have the blocks recompute theirs in the backward pass: every n-th of those that are
        trained, and all others.
        """
        every = self.config.gradient_checkpointing_every
        blocks_that_keep = {
            block for number, block in enumerate(self.list_blocks()) if number % every
        }

        # diffusers hands every block to this function, also those of networks that are not trained
        # and of parts that list_blocks leaves out.
        def run_block(block: nn.Module, *inputs: Any) -> Any:
            if block in blocks_that_keep:
                return block(*inputs)
            return checkpoint(block, *inputs, use_reentrant=False)

        for name in self.networks:
            getattr(self.pipeline, name).enable_gradient_checkpointing(run_block)

    # What a family says.

    @abstractmethod
    def _compute_latent_shape(self) -> tuple[int, ...]:
        """The shape of one latent; raises ``ModelError`` for a size that the family cannot draw
        (``_require_multiple``).
        """

    @abstractmethod
    def _encode_inputs(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """The network's inputs for each text; ``prompts`` hold the images to edit."""

    def _encode_negative_inputs(
        self, texts: list[str], prompts: Sequence[Prompt]
    ) -> dict[str, Tensor]:
        """The same for negative prompts, which some pipelines read without what they put before a
        prompt.
        """
        return self._encode_inputs(texts, prompts)

    @abstractmethod
    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """The network's own prediction, in the layout of its output."""

    @abstractmethod
    def list_blocks(self) -> list[nn.Module]:
        """As ``ebbflow.models.base.Model.list_blocks``."""

    @classmethod
    def _check_pipeline(cls, pipeline: Any, config: ModelConfig) -> None:
        """Raise ``ModelError`` for a pipeline that is not supported, or a key of the recipe that it
        does not take.
        """

    @classmethod
    def trained_parts(cls, config: ModelConfig) -> tuple[str, ...]:
        """Which of ``networks`` are trained."""
        return cls.networks[:1]

    @classmethod
    def _trained_network(cls, pipeline: Any, config: ModelConfig) -> Any:
        """As ``ebbflow.models.base.Model.transformer``."""
        (part,) = cls.trained_parts(config)
        return getattr(pipeline, part)

    @staticmethod
    def _load_own_parts(folder: Path) -> dict[str, Any]:
        """Parts of the pipeline that the family reads by itself; diffusers reads the others."""
        return {}

    def set_image_size(self, height: int, width: int) -> None:
        """Generate images of another size from now on; the schedule follows where its shift depends
        on the tokens.

        Raises:
            ModelError: the family cannot draw the size.
        """
        usual_size = (self.height, self.width)
        self.height = height
        self.width = width
        # The family reads the size from the attributes; one that it refuses must not stay there.
        try:
            self.latent_shape = self._compute_latent_shape()
        except ModelError:
            self.height, self.width = usual_size
            raise

    def count_tokens(self) -> Tokens:
        """The tokens of one sample; every family makes one of 2 x 2 latents."""
        shape = get_picture_shape(self.latent_shape)
        return Tokens(image=math.prod(shape[1:]) // 4, text=self.max_tokens)

    def list_networks(self) -> list[Any]:
        """List the networks that denoise, trained or not."""
        return [getattr(self.pipeline, part) for part in self.networks]

    def plan_shared_tokens(self, network: Any) -> dict[str, Any]:
        """Return which inputs of a network, and of its modules, processes that share tokens divide,
        and which outputs they gather: diffusers' plan of the network, without text that is only
        attended to.
        """
        plan: dict[str, Any] = dict(network._cp_plan)
        if not self.count_tokens().joint and "" in plan:
            plan[""] = {
                name: split for name, split in plan[""].items() if not name.startswith("encoder_")
            }
        return plan

    def count_shared_tokens(self) -> dict[str, int]:
        """Count the tokens of each sequence that processes divide among them, by its name in
        errors; of images to edit and of prompts without a fixed length no number is known.
        """
        tokens = self.count_tokens()
        counts = {"latent": tokens.image}
        # Text that is only attended to is whole in every process.
        if tokens.joint and not self.text_multiple:
            counts["prompt"] = tokens.text
        return counts

    def token_widths(self) -> tuple[int, int]:
        """The width of a token in the blocks, and of an encoded token of a prompt."""
        config = self.transformer.config
        # The name of the second one differs between the networks of diffusers.
        return (
            config.num_attention_heads * config.attention_head_dim,
            config.get("joint_attention_dim") or config.text_dim,
        )

    def _apply_guidance(
        self, prediction: Tensor, negative: Tensor, guidance: float | Tensor
    ) -> Tensor:
        """Classifier-free guidance (2207.12598) of the network's predictions."""
        return negative + guidance * (prediction - negative)

    def _guidance_of_rows(self, sigma: Tensor, conditioning: Conditioning) -> float | Tensor:
        """The scale of guidance, one for all rows or one for each, [N, 1, ...]."""
        return conditioning.guidance

    def compute_sigmas(self, steps: int) -> Tensor:
        """As ``ebbflow.models.base.Model.compute_sigmas``: evenly spaced, and then as the scheduler
        shifts them.
        """
        scheduler = self.pipeline.scheduler
        # [C, H, W] in patches of 2 x 2. The sigmas are those that the pipelines pass; the
        # scheduler's own default ends in a step from .001 to 0, which changes nothing.
        shape = get_picture_shape(self.latent_shape)
        tokens = shape[1] * shape[2] // 4
        scheduler.set_timesteps(
            sigmas=np.linspace(1.0, 1 / steps, steps), **self._schedule_arguments(tokens, steps)
        )
        sigmas: Tensor = scheduler.sigmas.clone()
        return sigmas

    def _schedule_arguments(self, tokens: int, steps: int) -> dict[str, float]:
        """The scheduler's arguments that depend on the number of the image's tokens and of the
        steps.
        """
        return dynamic_shift_arguments(self.pipeline.scheduler, tokens)

    def _unpack_prediction(self, prediction: Tensor) -> Tensor:
        """The network's output in the shape of the latents."""
        return prediction

    def _unscale_latents(self, latents: Tensor) -> Tensor:
        """Latents as the VAE decodes them: its shift, if it has one, and scale undone."""
        # VAEs of images have one factor for all channels; families of videos override this with
        # statistics of each channel.
        config = self.pipeline.vae.config
        scaled: Tensor = latents / config.scaling_factor + (config.get("shift_factor") or 0.0)
        return scaled

    def _scale_latents(self, latents: Tensor) -> Tensor:
        """The inverse of ``_unscale_latents``."""
        config = self.pipeline.vae.config
        scaled: Tensor = (latents - (config.get("shift_factor") or 0.0)) * config.scaling_factor
        return scaled

    # What follows from it.

    @torch.no_grad()
    def encode_prompts(self, prompts: Sequence[Prompt]) -> Conditioning:
        """As ``ebbflow.models.base.Model.encode_prompts``."""
        return self._encode_in_batches(self._encode_batch, prompts)

    @torch.no_grad()
    def encode_negative_prompts(self, prompts: Sequence[Prompt]) -> Conditioning:
        """The negative prompts alone, a row each, whatever the guidance of the recipe."""
        return self._encode_in_batches(self._encode_negative_batch, prompts)

    def _encode_in_batches(
        self, encode: Callable[[Sequence[Prompt]], Conditioning], prompts: Sequence[Prompt]
    ) -> Conditioning:
        parts = []
        starts = show_progress("encoding prompts", "batch", range(0, len(prompts), ENCODED_AT_ONCE))
        networks = [getattr(self.pipeline, name) for name in self.networks]
        with self._parts_on_device(*self.text_parts, networks=networks):
            for start in starts:
                batch = prompts[start : start + ENCODED_AT_ONCE]
                # To the CPU at once: the conditioning of all prompts would fill the device.
                parts.append(encode(batch).to(torch.device("cpu")))
        return Conditioning.concatenate(parts)

    def _encode_batch(self, prompts: Sequence[Prompt]) -> Conditioning:
        tensors = self._encode_inputs([prompt.prompt for prompt in prompts], prompts)
        negative = None
        if self.guided and self.config.guidance > 1:
            negative = self._encode_negative_batch(prompts)
        return Conditioning(tensors, negative, self.config.guidance)

    def _encode_negative_batch(self, prompts: Sequence[Prompt]) -> Conditioning:
        return Conditioning(
            self._encode_negative_inputs([prompt.negative_prompt for prompt in prompts], prompts)
        )

    def predict_velocity(
        self, latents: Tensor, sigma: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """As ``ebbflow.models.base.Model.predict_velocity``."""
        if conditioning.negative is None:
            return self._unpack_prediction(self._run_network(latents, sigma, conditioning))
        if conditioning.negative_gradient:
            # One pass over both keeps a device busier than two over half as many rows. [2 N, ...]:
            # the rows of the negative prompts, then those of the prompts, with the same latents and
            # sigmas.
            negative, prediction = self._run_network(
                torch.cat([latents, latents]),
                derive(lambda values: torch.cat([values, values]), sigma),
                conditioning.negative_then_positive,
            ).chunk(2)
        else:
            # Two passes in rollouts too, which need no gradient: both must round alike, or the
            # first ratio would not be 1. The prompts come first: before pytorch/pytorch#165068
            # autocast kept the weights that a pass without gradient had cast, and the next pass
            # gave them none.
            prediction = self._run_network(latents, sigma, conditioning.without_guidance())
            with torch.no_grad():
                negative = self._run_network(latents, sigma, conditioning.negative)
        return self._unpack_prediction(
            self._apply_guidance(prediction, negative, self._guidance_of_rows(sigma, conditioning))
        )

    @torch.no_grad()
    def decode_latents(self, latents: Tensor) -> np.ndarray:
        """As ``ebbflow.models.base.Model.decode_latents``."""
        # Few images at a time, since the activations of a VAE grow with their pixels.
        with self._parts_on_device("vae"):
            images = torch.cat(
                [
                    self._decode_batch(part.to(self.device)).cpu()
                    for part in torch.split(latents, self._images_per_vae_call())
                ]
            )
        return images.numpy()

    def _decode_batch(self, latents: Tensor) -> Tensor:
        """uint8 [n, height, width, 3], or [n, frames, height, width, 3]."""
        # Rounded, as the pipelines' own image processors round.
        return (self._decode_pixels(latents) * 255).round().to(torch.uint8)

    def decode_with_gradient(self, latents: Tensor) -> Tensor:
        """As ``ebbflow.models.base.Model.decode_with_gradient``. The VAE stays on the device, where
        the gradient needs it.
        """
        self.pipeline.vae.to(self.device)
        # [..., height, width, 3] to [..., 3, height, width], as networks of rewards take images.
        return self._decode_pixels(latents).movedim(-1, -3)

    def _decode_pixels(self, latents: Tensor) -> Tensor:
        """RGB in [0, 1], [n, height, width, 3], or [n, frames, height, width, 3]."""
        pixels: Tensor = self.pipeline.vae.decode(
            self._unscale_latents(latents.float()), return_dict=False
        )[0]
        # [n, 3, height, width] or [n, 3, frames, height, width], in about [-1, 1].
        return (pixels / 2 + 0.5).clamp(0, 1).movedim(1, -1)

    @torch.no_grad()
    def encode_images(self, images: np.ndarray) -> Tensor:
        """As ``ebbflow.models.base.Model.encode_images``."""
        wanted: tuple[int, ...] = (self.height, self.width, 3)
        if self.config.frames > 1:
            wanted = (self.config.frames, *wanted)
        if images.shape[1:] != wanted:
            raise ModelError(
                f"images of shape {images.shape[1:]}: the model draws {wanted}; resize them"
            )
        with self._parts_on_device("vae"):
            parts = torch.split(torch.from_numpy(images), self._images_per_vae_call())
            return torch.cat([self._encode_pixels(part.to(self.device)) for part in parts])

    def _encode_pixels(self, images: Tensor) -> Tensor:
        pixels = images.movedim(-1, 1).float() / 127.5 - 1
        return self._scale_latents(self._encode_with_vae(pixels))

    def _encode_with_vae(self, pixels: Tensor) -> Tensor:
        """What the VAE makes of pixels in [-1, 1]."""
        # The mode of its distribution, not a sample: the same image gives the same latents.
        latents: Tensor = self.pipeline.vae.encode(pixels).latent_dist.mode()
        return latents

    def save(self, folder: Path) -> None:
        """As ``ebbflow.models.base.Model.save``."""
        self.pipeline.save_pretrained(folder, max_shard_size=SHARD)

    def _images_per_vae_call(self) -> int:
        return max(1, PIXELS_AT_ONCE // (self.height * self.width * self.config.frames))

    def _require_multiple(self, multiple: int) -> None:
        for key, size in (("height", self.height), ("width", self.width)):
            if size % multiple:
                near = max(multiple, round(size / multiple) * multiple)
                raise ModelError(
                    f"model.{key} = {size}: {self.config.family} draws multiples of {multiple}"
                    f" pixels; take {near}"
                )

    def _parts_on_device(
        self, *parts: str, networks: Sequence[nn.Module] = ()
    ) -> AbstractContextManager[None]:
        """The named parts of the pipeline on the device, as ``parts_on_device``."""
        # A part may be missing from the folder, as T5 of SD3.
        modules = [getattr(self.pipeline, name) for name in parts]
        return parts_on_device(
            self.device, [module for module in modules if module is not None], networks
        )


def match_norm(guided: Tensor, prediction: Tensor) -> Tensor:
    """A guided prediction, rescaled to the norm that the prompt's own has over the last dimension.

    A large guidance scale makes predictions longer than any that the network was trained on.
    """
    ratio = prediction.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
    rescaled: Tensor = guided * ratio
    return rescaled


def channel_statistics(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of a video VAE's latents, to broadcast with
    latents [N, C, ...].
    """
    # [C, 1, ...]: without the batch, which broadcasting adds.
    shape = (-1,) + (1,) * (like.ndim - 2)
    mean, std = (
        torch.tensor(values).view(shape).to(like)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std


def dynamic_shift_arguments(
    scheduler: Any, tokens: int, max_shift: float = 1.15
) -> dict[str, float]:
    """``mu`` for schedulers whose shift depends on the image's tokens: linear between two sizes;
    nothing for the others.

    ``max_shift`` is what the pipeline takes where the scheduler's configuration does not say.
    """
    # The pipelines' ``calculate_shift``, with their defaults: mu is .5 at 256 tokens (256 x 256
    # pixels) and 1.15 at 4096 (1024 x 1024), and goes on beyond both.
    config = scheduler.config
    if not config.get("use_dynamic_shifting"):
        return {}
    small = config.get("base_image_seq_len", 256)
    large = config.get("max_image_seq_len", 4096)
    low = config.get("base_shift", 0.5)
    high = config.get("max_shift", max_shift)
    return {"mu": low + (high - low) * (tokens - small) / (large - small)}
