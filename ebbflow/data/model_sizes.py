"""How large a base model and one sample of it are, and what is computed at once: what an estimate
follows from, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The recipe imports the rewards' options, which import this module: a circle at run time.
    from ebbflow.recipe.model import Precision

BYTES: dict[Precision, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""
BLOCK_BYTES = 34
"""Bytes that a block saves per token and unit of width, in 16 bits (2205.05198, equation 2 without
5 a s / h).
"""
ENCODED_AT_ONCE = 16
"""Prompts per pass of the text encoders."""
PIXELS_AT_ONCE = 2**21
"""Pixels per pass of the VAE: eight images of 512 x 512."""
Shape = tuple[int, int]
"""(inputs, outputs) of a linear layer."""


class SizeError(Exception):
    """A model whose sizes cannot be computed."""


@dataclass(frozen=True)
class ModelSizes:
    """What an estimate needs to know of a base model.

    Attributes:
        parameters: of the transformer.
        buffers: numbers in its checkpoint that are no parameters.
        blocks: of the transformer.
        width: of a token in them.
        linears: the transformer's linear layers that the velocity depends on, by name.
        lora_targets: the layers that LoRA adapts where the recipe names none.
        text_encoders: parameters.
        unused: parameters of the transformer that the velocity does not depend on, which are never
            trained.
        frozen: parameters of another network that also denoises and is never trained.
        vae: parameters.
        decoding: bytes that the VAE's tensors take at most while it decodes, per pixel of an image.
        decoding_with_gradient: the same, of decoding with gradient and the backward pass.
        vae_encodes_prompts: prompts come with an image.
        decoded_frames: of a video, that the VAE decodes at a time.
        text_width: of an encoded token of a prompt.
        stored: bytes of the weights as they are published.

    Example:
        The glyph model::

            ModelSizes(parameters=1_699_264, blocks=3, linears={"proj_out": (128, 64), ...}, ...)
    """

    parameters: int
    blocks: int
    width: int
    linears: Mapping[str, Shape]
    lora_targets: Sequence[str]
    text_encoders: int
    vae: int
    text_width: int
    stored: int
    decoding: int = 0
    decoding_with_gradient: int = 0
    vae_encodes_prompts: bool = False
    decoded_frames: int = 1
    buffers: int = 0
    frozen: int = 0
    unused: int = 0


@dataclass(frozen=True)
class SampleSize:
    """One sample of a model as a recipe has it generated.

    Attributes:
        latent_shape: without the batch.
        pixels: height x width x frames.
        tokens: that a block works on, those of the text included where they go through the blocks.
        joint: whether they do.
        text_tokens: encoded tokens of a prompt, at most.
        conditioning: numbers that a prompt is encoded to.
        passes: evaluations of the network for a denoising step; two with classifier-free guidance.

    Example:
        An image of 512 x 512 of SD3.5, with guidance: 32 x 32 image tokens and 77 + 256 of text::

            SampleSize(
                latent_shape=(16, 64, 64),
                pixels=262_144,
                tokens=1357,
                joint=True,
                text_tokens=333,
                conditioning=333 * 4096,
                passes=2,
            )
    """

    latent_shape: tuple[int, ...]
    pixels: int
    tokens: int
    joint: bool
    text_tokens: int
    conditioning: int
    passes: int

    @property
    def num_elements(self) -> int:
        """Numbers in its latents."""
        return math.prod(self.latent_shape)


def is_layer_adapted(name: str, targets: Sequence[str]) -> bool:
    """Whether LoRA adapts the linear layer with a name."""
    # As peft matches names: "to_q" is "attn.to_q" and never "add_to_q".
    return f".{name}".endswith(tuple(f".{target}" for target in targets))


def select_adapted_layers(linears: Mapping[str, Shape], targets: Sequence[str]) -> list[Shape]:
    """The linear layers that LoRA adapts: those whose name is or ends in a target.

    Raises:
        SizeError: no layer has such a name.
    """
    adapted = [shape for name, shape in linears.items() if is_layer_adapted(name, targets)]
    if not adapted:
        raise SizeError(
            f"no layer of the transformer is called {' or '.join(targets)}; see policy.targets"
        )
    return adapted


def count_lora_parameters(
    linears: Mapping[str, Shape], targets: Sequence[str], rank: int, dora: bool = False
) -> int:
    """Parameters of LoRA adapters (2106.09685): rank (inputs + outputs) for each layer that they
    adapt.

    Of DoRA (2402.09353) as many as outputs more.

    Raises:
        SizeError: no layer has such a name.
    """
    # A is [rank, inputs], B is [outputs, rank], and DoRA's magnitude is [outputs].
    return sum(
        rank * (inputs + outputs) + dora * outputs
        for inputs, outputs in select_adapted_layers(linears, targets)
    )
