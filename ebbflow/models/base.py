"""What the rest of the library asks of a model family; the adapters in ``ebbflow.models.families``
implement it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ebbflow.data.prompts import Prompt
from ebbflow.flow.host_values import derive, to_device

# Also imported from here, beside what raises it.
from ebbflow.recipe.base_folder import ModelError as ModelError
from ebbflow.recipe.model import ModelConfig, Precision

DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
READ_DTYPE: Any = vars(torch._C.TensorBase)["dtype"].__get__
"""What a mode sees when ``tensor.dtype`` is read."""


@dataclass(frozen=True)
class Conditioning:
    """Encoded prompts, a row each.

    Attributes:
        tensors: the network's inputs beside latents and sigma, by name; each [N, ...], padded along
            dimension 1 from rank 2 on.
        negative: the encoded negative prompts, a row each; None where no classifier-free guidance
            needs them.
        guidance: scale of classifier-free guidance, or the guidance that the network takes as an
            input. 1 is none.
        guidance_2: that of the transformer for low noise, for families with two; None: as the
            model's configuration says.
        negative_gradient: whether the gradient of a guided prediction goes through the prediction
            for the negative prompt. Without it the negative prompts have a pass of their own.

    Example:
        Two prompts for SD3 with guidance, 77 tokens of CLIP and up to 256 of T5 each::

            Conditioning(
                {"embeds": torch.zeros(2, 333, 4096), "pooled": torch.zeros(2, 2048)},
                negative=Conditioning(
                    {"embeds": torch.zeros(2, 333, 4096), "pooled": torch.zeros(2, 2048)}
                ),
                guidance=4.5,
            )
    """

    tensors: Mapping[str, Tensor]
    negative: Conditioning | None = None
    guidance: float = 1.0
    guidance_2: float | None = None
    negative_gradient: bool = True

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def select_rows(self, index: Tensor | slice) -> Conditioning:
        """Some rows, repeated where ``index`` repeats them."""
        if isinstance(index, slice):
            return self._map_tensors(lambda values: derive(lambda v: v[index], values))
        return self._map_tensors(lambda values: derive(lambda v, i: v[i], values, index))

    def to(self, device: torch.device) -> Conditioning:
        """On another device; of masks the host keeps the values, for networks that need the
        lengths of prompts.
        """
        return self._map_tensors(
            lambda values: (
                to_device(values, device) if values.dtype == torch.bool else values.to(device)
            )
        )

    def to_dtype(self, dtype: torch.dtype) -> Conditioning:
        """In another precision, but for masks."""
        parts = [self]
        if self.negative:
            parts.append(self.negative)
        if all(
            values.dtype == dtype
            for part in parts
            for values in part.tensors.values()
            if values.is_floating_point()
        ):
            # The same object, with the ``negative_then_positive`` that it has cached: the loop over
            # denoising steps comes here in each of them.
            return self
        return self._map_tensors(
            lambda values: values.to(dtype) if values.is_floating_point() else values
        )

    def without_guidance(self) -> Conditioning:
        """Without negative prompts, for losses on the network's own prediction; a guidance that is
        an input stays.
        """
        return replace(self, negative=None) if self.negative else self

    @cached_property
    def negative_then_positive(self) -> Conditioning:
        """The negative prompts and then the prompts, [2 N]: the rows of a pass under guidance, the
        same in every step.
        """
        assert self.negative is not None
        return Conditioning.concatenate([self.negative, self.without_guidance()])

    def for_precision(self, precision: Precision) -> Conditioning:
        """As the forward pass takes it: in float32 nothing else casts prompts that were encoded in
        16 bits.
        """
        # Negative prompts may be there for the guided reference alone; the policy, which generates
        # without guidance, would pay for them with a pass of twice the rows.
        needed = self.without_guidance() if self.negative and self.guidance == 1 else self
        return needed.to_dtype(torch.float32) if precision == "float32" else needed

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> Conditioning:
        tensors = {name: change(values) for name, values in self.tensors.items()}
        return replace(
            self,
            tensors=tensors,
            negative=self.negative._map_tensors(change) if self.negative else None,
        )

    @staticmethod
    def concatenate(parts: Sequence[Conditioning]) -> Conditioning:
        """The rows of all parts, padded with zeros to the longest prompt."""
        if len(parts) == 1:
            return parts[0]
        tensors = {
            name: derive(_pad_and_concatenate, *(part[name] for part in parts))
            for name in parts[0].tensors
        }
        negatives = [part.negative for part in parts if part.negative is not None]
        return replace(
            parts[0],
            tensors=tensors,
            negative=Conditioning.concatenate(negatives) if negatives else None,
        )


def _pad_and_concatenate(*tensors: Tensor) -> Tensor:
    """The rows of all tensors, those of rank 2 and more padded with zeros to the longest dimension
    1.
    """
    # [N]: nothing to pad.
    if tensors[0].ndim < 2:
        return torch.cat(tensors)
    # [N, L, ...] with an L for each part. torch's pad counts dimensions from the last one: a pair
    # of zeros for each after dimension 1, then that. Masks are padded with False, which masks.
    longest = max(values.shape[1] for values in tensors)
    lengths = [(0, 0) * (values.ndim - 2) + (0, longest - values.shape[1]) for values in tensors]
    return torch.cat(
        [nn.functional.pad(values, length) for values, length in zip(tensors, lengths, strict=True)]
    )


@dataclass(frozen=True)
class Tokens:
    """How many tokens a sample has, for estimates.

    Attributes:
        image: of its latents.
        text: of its prompt, encoded, at most.
        edited: of the image that it edits.
        condition_channels: numbers of the conditioning that are channels of the input, not tokens.
        joint: text goes through the blocks with the image, instead of only being attended to.

    Example:
        SD3 in 1024 x 1024 pixels, latents of 128 x 128 in patches of 2 x 2::

            Tokens(image=4096, text=333)
    """

    image: int
    text: int
    edited: int = 0
    condition_channels: int = 0
    joint: bool = True


class Experts(nn.Module):
    """Networks of one architecture that are trained together, each the velocity network of a band
    of sigmas.

    It is never called: a family calls the networks. Their parameters have the name of the network
    before theirs.
    """

    def __init__(self, networks: Mapping[str, Any]) -> None:
        super().__init__()
        for name, network in networks.items():
            self.add_module(name, network)
        # Of one architecture, so that estimates and checks may ask any of them.
        self.config = next(iter(networks.values())).config


def trained_networks(transformer: Any) -> dict[str, Any]:
    """The diffusers networks of a ``Model.transformer``, by what stands before the names of their
    parameters in it.
    """
    if isinstance(transformer, Experts):
        return {f"{name}.": network for name, network in transformer.named_children()}
    return {"": transformer}


def is_trainable(model: Model, name: str) -> bool:
    """Whether the velocity depends on a parameter or layer of a network, by its name there; the
    others are never trained.
    """
    return not any(
        fnmatchcase(name, pattern) for pattern in getattr(model, "unused_parameters", ())
    )


Size = tuple[int, int]
"""Height and width of images, in pixels."""


class Model(Protocol):
    """A loaded base model. A user's family is a class with these members (``docs/extending.md``).

    Attributes:
        transformer: the velocity network, the only part that is ever trained; ``Experts`` where
            that is two networks.
        latent_shape: of one latent, without the batch.
        lora_targets: names of the linear layers that LoRA adapts unless the recipe names others.
        pipeline_class: the family's diffusers pipeline, which reads and writes LoRA files.
        precision: of the network's arithmetic.
    """

    # A diffusers ModelMixin: an nn.Module that also saves, loads and takes adapters.
    transformer: Any
    latent_shape: tuple[int, ...]
    lora_targets: list[str]
    pipeline_class: Any
    precision: Precision

    @classmethod
    def load(cls, folder: Path, config: ModelConfig, device: torch.device) -> Model:
        """The model of a base-model folder, to generate as ``config`` says, frozen and in
        evaluation mode.

        Raises:
            ModelError: the folder is no base model of the family, or ``config`` asks for what it
                cannot do.
        """

    def compute_sigmas(self, steps: int) -> Tensor:
        """The family's schedule of ``steps`` denoising steps: float32 [steps + 1], descending,
        ending in 0.
        """

    def encode_prompts(self, prompts: Sequence[Prompt]) -> Conditioning:
        """Encoded prompts, and negative prompts under guidance; deterministic, without gradient, on
        any device.
        """

    def predict_velocity(
        self, latents: Tensor, sigma: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """The forward pass, guidance included, [N, *latent_shape]; ``sigma`` is [N] in [0, 1].
        Called through ``predict``.
        """

    def decode_latents(self, latents: Tensor) -> np.ndarray:
        """Images, uint8 RGB [N, height, width, 3], or videos, [N, frames, height, width, 3]."""

    def decode_with_gradient(self, latents: Tensor) -> Tensor:
        """Decode with gradient, for rewards that give one: RGB in [0, 1], [N, 3, height, width]
        or [N, frames, 3, height, width].
        """

    def encode_images(self, images: np.ndarray) -> Tensor:
        """Encode uint8 RGB images or videos as latents [N, *latent_shape]: the inverse of
        ``decode_latents`` up to quantisation.

        Raises:
            ModelError: the images do not have the size of the latents.
        """

    def save(self, folder: Path) -> None:
        """Write the model as a pipeline folder, its large parts in shards."""

    def list_blocks(self) -> list[nn.Module]:
        """The repeated blocks of the transformer, in the order of their calls: the units of FSDP
        sharding.

        With ``fsdp.prefetch``, a block that is called before the one listed ahead of it would
        compute with stale weights.
        """


def predict(
    model: Model,
    latents: Tensor,
    sigma: Tensor,
    conditioning: Conditioning,
    precision: Precision | None = None,
) -> Tensor:
    """The velocity, float32 [N, *latent_shape], in ``precision`` or the model's own.

    Rollout, training and evaluation all call this one forward pass, which makes the first ratio of
    a policy gradient exactly 1.
    """
    precision = precision or model.precision
    conditioning = conditioning.for_precision(precision)
    bfloat16_pass = getattr(model, "bfloat16_pass", None)
    if precision == "bfloat16" and bfloat16_pass is not None:
        # All weights are in bfloat16 or cast by the pass: autocast would only add casts.
        with bfloat16_pass():
            velocity = model.predict_velocity(
                latents.bfloat16(), sigma, conditioning.to_dtype(torch.bfloat16)
            )
            return velocity.float()
    # Autocast, not a cast of the network: trained parameters stay float32, and are rounded in each
    # operation. The prediction becomes float32 again for the sampler's step and the log-probs.
    with torch.autocast(latents.device.type, DTYPES[precision], enabled=precision != "float32"):
        return model.predict_velocity(latents, sigma, conditioning).float()


def can_skip_autocast(model: Model) -> bool:
    """Whether the network of a model takes inputs in bfloat16 if its weights are in it, as those of
    diffusers do; a user's own may count on autocast.
    """
    return bool(getattr(model, "runs_without_autocast", False))


def predict_in_float32(
    model: Model, latents: Tensor, sigma: Tensor, conditioning: Conditioning
) -> Tensor:
    """Predict as ``predict``, with every operation in float32, whatever the weights are stored in.

    It shows how far 16 bits round. One weight at a time is widened, so that the network needs no
    second copy; a compiled network runs as it is.
    """
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), _WidenTo32Bits():
        return model.predict_velocity(
            latents.float(), sigma, conditioning.to_dtype(torch.float32)
        ).float()


class _WidenTo32Bits(TorchFunctionMode):
    """Gives every function float32 for tensors of 16 bits."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == READ_DTYPE:
            # Networks cast activations to the type of their weights.
            dtype = func(*args)
            return torch.float32 if dtype in SIXTEEN_BITS else dtype
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **(kwargs or {}))
        keywords = {key: _widen(value) for key, value in (kwargs or {}).items()}
        return func(*map(_widen, args), **keywords)


def _widen(value: Any) -> Any:
    """Widen an argument of a function of torch: a tensor, or a list or tuple of them."""
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunction():
            return value.float() if value.dtype in SIXTEEN_BITS else value
    # Not torch.Size and other tuples of numbers. A mapping over pytrees took half of each pass of
    # a small network: a pass calls hundreds of functions.
    if type(value) in (list, tuple):
        return type(value)(map(_widen, value))
    return value


def predict_checkpointed(
    model: Model, latents: Tensor, sigma: Tensor, conditioning: Conditioning
) -> Tensor:
    """``predict`` with a gradient that keeps no activations: the pass is repeated when the gradient
    is taken.
    """
    # Nothing in the network is random, so that the second pass needs no random state of the first.
    velocity: Tensor = checkpoint(
        predict, model, latents, sigma, conditioning, use_reentrant=False, preserve_rng_state=False
    )
    return velocity


@contextmanager
def generate_in_size(model: Model, size: Size | None) -> Iterator[None]:
    """Have a model generate and train in another size inside the block; None changes nothing.

    Raises:
        ModelError: a user's family has no ``set_image_size``, or the family cannot draw the size.
    """
    if size is None:
        yield
        return
    resizable: Any = model
    require_resize(model)
    usual_size = (resizable.height, resizable.width)
    resizable.set_image_size(*size)
    try:
        yield
    finally:
        resizable.set_image_size(*usual_size)


def require_pixels(model: Any, algorithm: str) -> None:
    """Check that a model, or its class, decodes with gradient.

    Raises:
        ModelError: a user's family has no ``decode_with_gradient``.
    """
    if not hasattr(model, "decode_with_gradient"):
        raise ModelError(
            f"{algorithm} learns from the gradient of the rewards, and {_class_name(model)} has no"
            " decode_with_gradient(latents); write one (docs/extending.md), or set"
            " algorithm.name to mix_grpo"
        )


def require_resize(model: Any) -> None:
    """Check that a model, or its class, generates in several sizes.

    Raises:
        ModelError: a user's family has no ``set_image_size``.
    """
    if not hasattr(model, "set_image_size"):
        raise ModelError(
            f"{_class_name(model)} has no set_image_size(height, width); write one"
            " (docs/extending.md), or leave 'sizes' of stages, evaluation.height and"
            " evaluation.width out"
        )


def require_split_guidance(model: Any) -> None:
    """Check that a model, or its class, predicts under guidance without the gradient of the
    negative prompt's prediction.

    Raises:
        ModelError: a user's family does not say that it does.
    """
    if not getattr(model, "splits_guidance", False):
        raise ModelError(
            f"negative_gradient: false needs predictions without it, and {_class_name(model)} has"
            " no splits_guidance = True (docs/extending.md); leave negative_gradient out"
        )


def find_lora_class(model: Any) -> Any:
    """The class of diffusers that reads and writes the LoRA files of a model: its pipeline, but for
    pipelines without that.
    """
    return getattr(model, "lora_class", model.pipeline_class)


def _class_name(model: Any) -> str:
    return model.__name__ if isinstance(model, type) else type(model).__name__


def device_of(model: Model) -> torch.device:
    """The device that a model's network computes on."""
    parameter: Tensor = next(model.transformer.parameters())
    if hasattr(model, "pending_weights"):
        without_weights: Any = model
        device: torch.device = without_weights.device
        return device
    # With FSDP2 and model.cpu_offload the parameters wait in main memory, and move to the GPU block
    # by block: their own device is not where the network computes.
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cuda":
        return default_device()
    return parameter.device


def default_device() -> torch.device:
    """The accelerator of this process, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # With its number: "cuda" alone would mean another one after set_device, and does not compare
    # equal to the device of a tensor.
    return torch.device("cuda", torch.cuda.current_device())
