"""Forward passes of diffusers' networks that never wait for the device.

diffusers' own read masks on the CPU: they select tokens by boolean masks, ask whether an image is
all zeros, and list the lengths of prompts. On a GPU each of these waits for all kernels before it,
and the next ones are launched late. Here the same numbers are computed from shapes, from index
tensors on the device, or from lengths that the host knows; the tests compare with diffusers to the
bit. Inputs that these passes do not take go to diffusers' own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from diffusers.models.transformers.transformer_lumina2 import Lumina2RotaryPosEmbed
from torch import Tensor

from ebbflow.flow.host_values import read_on_host


def replace_forward(network: Any, forward: Callable[..., Any]) -> None:
    """Have a network compute with another function, which gets it as the first argument. Its class,
    and so its saved configuration, stay.
    """
    network.forward = MethodType(forward, network)


def computes_with(network: Any, forward: Callable[..., Any]) -> bool:
    """Return whether ``replace_forward`` has given the network this function, and nothing has
    wrapped it since.
    """
    return getattr(network.forward, "__func__", None) is forward


class _KnownLengths:
    """Answers what diffusers' positions of Lumina-Image 2.0 ask of a mask."""

    def __init__(self, mask: Tensor) -> None:
        self.shape = mask.shape
        self.lengths: list[int] = read_on_host(mask).sum(1).tolist()

    def sum(self, dim: int) -> _KnownLengths:
        return self

    def tolist(self) -> list[int]:
        return self.lengths


class LuminaPositions(Lumina2RotaryPosEmbed):  # type: ignore[misc]
    """diffusers' positions of Lumina-Image 2.0, given lengths that the host knows and tables that
    stay on the device.
    """

    freqs_cis: list[Tensor]

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Any:
        self.freqs_cis = [table.to(hidden_states.device) for table in self.freqs_cis]
        return super().forward(hidden_states, _KnownLengths(attention_mask))


def run_text_to_video(network: Any, hidden_states: Tensor, **inputs: Any) -> Any:
    """The forward pass of ``HunyuanVideo15Transformer3DModel`` without an image.

    Args:
        hidden_states: [N, channels, frames, rows, columns].
        inputs: as of its ``forward``; ``image_embeds`` of no tokens chooses this pass.
    """
    if inputs["image_embeds"].shape[1]:
        return type(network).forward(network, hidden_states, **inputs)
    timestep = inputs["timestep"]
    rotary = network.rope(hidden_states)
    time = network.time_embed(timestep, timestep_r=None)
    latents = network.x_embedder(hidden_states)
    text_mask = inputs["encoder_attention_mask"]
    text = network.context_embedder(inputs["encoder_hidden_states"], timestep, text_mask)
    quoted = network.context_embedder_2(inputs["encoder_hidden_states_2"])
    # Kinds of tokens: 0 the prompt's, 1 those of its quoted text.
    text = text + network.cond_type_embed(torch.zeros_like(text[:, :, 0], dtype=torch.long))
    quoted = quoted + network.cond_type_embed(torch.ones_like(quoted[:, :, 0], dtype=torch.long))
    tokens, mask = _put_padding_last(
        torch.cat([quoted, text], 1),
        torch.cat([inputs["encoder_attention_mask_2"], text_mask], 1).bool(),
    )
    for block in network.transformer_blocks:
        latents, tokens = _call_block(network, block, latents, tokens, time, mask, rotary)
    latents = network.proj_out(network.norm_out(latents, time))

    # [N, frames, rows, columns, channels, patch of frames, rows, columns] -> [N, channels, ...]
    count, _, *sizes = hidden_states.shape
    config = network.config
    patch = (config.patch_size_t, config.patch_size, config.patch_size)
    places = [size // step for size, step in zip(sizes, patch, strict=True)]
    video = latents.reshape(count, *places, -1, *patch).permute(0, 4, 1, 5, 2, 6, 3, 7)
    return (video.flatten(6, 7).flatten(4, 5).flatten(2, 3),)


def _put_padding_last(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Order the tokens [N, L, D] of each row so that those of its mask [N, L] come first, and set
    the others to zero; returns tokens and mask.
    """
    # Stable: tokens keep their order among those of the mask, and among the others.
    order = (~mask).int().argsort(dim=1, stable=True)
    rows = torch.arange(len(mask), device=mask.device)[:, None]
    # By index, whose gradient has a deterministic kernel, unlike that of gather.
    mask = mask[rows, order]
    return tokens[rows, order].masked_fill(~mask[..., None], 0), mask


def run_text_to_image(network: Any, hidden_states: Tensor, **inputs: Any) -> Any:
    """The forward pass of ``QwenImage21Transformer2DModel`` without images to edit: the prompt, and
    after it the image.

    Args:
        hidden_states: [N, rows * columns, channels].
        inputs: as of its ``forward``; an ``img_mask`` of None chooses this pass.
    """
    if inputs["img_mask"] is not None:
        return type(network).forward(network, hidden_states, **inputs)
    _, height, width = inputs["img_shapes"][0][-1]
    latents = network.img_in(hidden_states)
    text = network.txt_in(inputs["encoder_hidden_states"])
    length = text.shape[1]
    # Whether a token is the image's: the others are modulated as at time 0.
    is_image = None
    time = inputs["timestep"].to(latents.dtype)
    if network.config.causal_condition:
        is_image = torch.arange(length + height * width, device=latents.device) >= length
        time = torch.cat([time, time.new_zeros(1)])
    time = network.time_text_embed(time, latents)
    tokens = torch.cat([text, latents.to(text.dtype)], 1)
    modulation = network.modulation(time)
    rotary = _find_rotation(network.pos_embed, length, height, width, latents.device)
    no_cache = (None, None, None)
    # The prompt attends causally, and not to the image; neither is padded.
    attention = ([(0, length, True)], None)
    for block in network.transformer_blocks:
        tokens = _call_block(
            network, block, tokens, modulation, rotary, None, is_image, *no_cache, *attention
        )
    return (network.proj_out(network.norm_out(tokens, time, is_image)),)


def _find_rotation(
    positions: Any, length: int, height: int, width: int, device: torch.device
) -> Tensor:
    """The complex rotations of a prompt of ``length`` tokens and of an image after it, as
    ``QwenImage21Rope``, [length + height * width, D / 2].
    """
    # Moved once, as diffusers does.
    positions.freqs = [table.to(device) for table in positions.freqs]
    text = torch.arange(length, device=device)
    # The image is in one place of the text, and its rows and columns are counted from its middle.
    place = torch.full((height * width,), length, device=device)
    rows, columns = (
        torch.arange(-math.ceil(size / 2), size // 2, device=device) for size in (height, width)
    )
    indices: Sequence[Tensor] = (place, rows.repeat_interleave(width), columns.repeat(height))
    return torch.cat(
        [
            table[torch.cat([text, index])]
            for table, index in zip(positions.freqs, indices, strict=True)
        ],
        -1,
    )


def _call_block(network: Any, block: Any, *inputs: Any) -> Any:
    """Call a block, as diffusers does where it keeps no activations."""
    if torch.is_grad_enabled() and network.gradient_checkpointing:
        return network._gradient_checkpointing_func(block, *inputs)
    return block(*inputs)
