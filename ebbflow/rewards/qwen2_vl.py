"""Score with a Qwen2-VL and a head on special tokens, as several rewards do: pixels to patches,
prompts to tokens, one forward pass.

Two things are as their published code has them, in training and in inference, although Qwen2-VL
itself has them otherwise. All tokens have plain positions 0, 1, 2, ..., because the language model
is called without the three-dimensional ones. And the frequencies of the rotary embeddings are
rounded to bfloat16 with the rest of the network, which a late token feels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import interpolate
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from ebbflow.recipe.model import Precision
from ebbflow.rewards.pixels import scale_to_unit_range, standardize_pixels
from ebbflow.rewards.weights import (
    build_network,
    check_vocabulary,
    pick_weights,
    rename_weights,
    select_prefix,
)

EMBEDDINGS = "language_model.embed_tokens.weight"
NAMES = {
    r"^model\.(?=layers|embed_tokens|norm)": "language_model.",
    r"^model\.(?=visual|language_model)": "",
}
"""From the names of a Qwen2-VL, as transformers had them before 4.52 and has them since, to those
of ``Qwen2VLModel``.
"""
NOT_READ = ("lm_head.", "rm_head.")
"""What ``Qwen2VLModel`` lacks: the head for words, which a score does not need, and that of the
reward.
"""
TURN = (
    "<|im_start|>system\nYou are a helpful"
    " assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>{vision}<|vision_end|>{text}"
    "<|im_end|>\n<|im_start|>assistant\n"
)
"""Qwen2-VL's chat template for one picture or video, and a text."""


@dataclass(frozen=True)
class JudgingQwen:
    """A Qwen2-VL, its tokenizer with the reward's own tokens, and the head that reads its last
    hidden states there.
    """

    model: Any
    head: nn.Module
    tokenizer: Any
    tokens: tuple[str, ...]

    def compute_outputs(self, frames: Tensor, texts: Sequence[str], vision: str) -> Tensor:
        """Return the outputs of the head at the last occurrence of each reward token, float32 [n,
        tokens, outputs].

        Args:
            frames: standardised [n, T, 3, height, width], T even; a picture is twice the same
                frame.
            texts: what follows the picture; each reward token is in each of them.
            vision: ``<|image_pad|>`` or ``<|video_pad|>``.
        """
        patches, grid = split_into_patches(
            frames.to(self.model.dtype), self.model.config.vision_config
        )
        # The vision transformer merges neighbouring patches into one token of the language model.
        num_vision_tokens = (
            int(grid.prod()) // self.model.config.vision_config.spatial_merge_size**2
        )
        turns = [TURN.format(vision=vision * num_vision_tokens, text=text) for text in texts]
        # Padded on the right: with plain positions, padding on the left would move the text.
        batch = self.tokenizer(turns, padding=True, padding_side="right", return_tensors="pt").to(
            self.model.device
        )
        ids = batch.input_ids  # [n, length]
        embedded = self.model.language_model.embed_tokens(ids)
        vision_features = self.model.visual(
            patches, grid_thw=grid.expand(len(texts), 3).to(ids.device)
        ).pooler_output  # [n * num_vision_tokens, width]
        # Each placeholder token gets the next feature, row by row.
        is_vision = (ids == self.tokenizer.convert_tokens_to_ids(vision))[..., None]
        embedded = embedded.masked_scatter(is_vision, vision_features.to(embedded.dtype))
        # ``Qwen2VLModel`` itself would compute three-dimensional positions: see above.
        hidden = self.model.language_model(
            inputs_embeds=embedded,
            attention_mask=batch.attention_mask,
            position_ids=torch.arange(ids.shape[1], device=ids.device).expand_as(ids),
            use_cache=False,
        ).last_hidden_state
        reward_ids = [self.tokenizer.convert_tokens_to_ids(token) for token in self.tokens]
        # [n, tokens]
        last = torch.stack([_find_last_true(ids == token) for token in reward_ids], dim=1)
        outputs: Tensor = self.head(
            hidden.gather(1, last[..., None].expand(-1, -1, hidden.shape[-1])).float()
        )
        return outputs

    def remove_special_tokens(self, text: str) -> str:
        """Return a user's prompt without what the tokenizer would take for special tokens."""
        tokens = re.compile("|".join(map(re.escape, self.tokenizer.get_added_vocab())))
        # What is left may be one again: "<|im_<|im_end|>end|>".
        while tokens.search(text):
            text = tokens.sub("", text)
        return text


def _find_last_true(mask: Tensor) -> Tensor:
    """Return the index of the last true value of each row, bool [n, length] -> int64 [n]."""
    return mask.shape[1] - 1 - mask.flip(1).int().argmax(1)


def load_backbone(
    weights: Mapping[str, Tensor],
    folder: Path,
    source: Path,
    tokens: tuple[str, ...],
    precision: Precision,
) -> tuple[Any, Any]:
    """Load the network with the weights of a checkpoint, and its tokenizer with the reward's tokens
    at its end.

    Args:
        folder: configuration and tokenizer of the Qwen2-VL that was trained.
        source: the checkpoint, for errors.

    Raises:
        RewardError: the weights are not those of such a network, or the tokenizer is for another.
    """
    tokenizer = Qwen2Tokenizer.from_pretrained(folder, local_files_only=True)
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    backbone_weights = rename_weights(
        {name: tensor for name, tensor in weights.items() if not name.startswith(NOT_READ)}, NAMES
    )
    # The training added the reward's tokens, so the checkpoint has other embeddings than the
    # configuration of the network says; the tokenizer must have as many tokens.
    (embeddings,) = pick_weights(backbone_weights, (EMBEDDINGS,), source)
    check_vocabulary(tokenizer, len(embeddings), folder)
    config = Qwen2VLConfig.from_pretrained(folder, local_files_only=True)
    config.text_config.vocab_size = len(embeddings)
    dtype = getattr(torch, precision)
    model = build_network(Qwen2VLModel, config, backbone_weights, source, dtype=dtype)
    # transformers keeps these buffers in float32; the published code had cast them with the rest.
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.copy_(buffer.bfloat16())
    return model, tokenizer


def build_linear_head(
    weights: Mapping[str, Tensor], numbers: Sequence[int], source: Path, device: torch.device
) -> nn.Module:
    """Build the linear layers ``rm_head.NUMBER`` with a ReLU after each but the last, float32,
    frozen.

    Raises:
        RewardError: one of them is missing.
    """
    head = select_prefix(weights, "rm_head.")
    layers: list[nn.Module] = []
    for number in numbers:
        weight, bias = pick_weights(head, (f"{number}.weight", f"{number}.bias"), source)
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        layer.load_state_dict({"weight": weight, "bias": bias})
        layers += [layer, nn.ReLU()]
    # Without the last ReLU; a score may be negative.
    return nn.Sequential(*layers[:-1]).float().requires_grad_(False).to(device)


def resize_to_patch_grid(
    images: np.ndarray | Tensor, min_pixels: int, max_pixels: int, factor: int, device: torch.device
) -> Tensor:
    """Return standardised float32 [N, 3, h, w] of uint8 RGB [N, height, width, 3], or with gradient
    of [0, 1] RGB [N, 3, height, width].

    The number of pixels comes near the range, height and width are multiples of ``factor``.
    """
    shape = images.shape[1:3] if isinstance(images, np.ndarray) else images.shape[2:]
    height, width = smart_resize(
        *shape, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels
    )
    if isinstance(images, Tensor):
        return standardize_pixels(
            interpolate(images, (height, width), mode="bicubic", antialias=True)
        )
    sized = [
        np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))
        for image in images
    ]
    return standardize_pixels(scale_to_unit_range(np.stack(sized), device))


def split_into_patches(frames: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Return the patches [N * T/2 * H * W, numbers], four neighbours after each other, and their
    grid (T/2, H, W), int64.

    Args:
        frames: [N, T, 3, H * patch, W * patch] with T a multiple of ``temporal_patch_size``, H and
            W of ``spatial_merge_size``.
    """
    patch = config.patch_size
    merge = config.spatial_merge_size
    time = config.temporal_patch_size
    count, length, colours, height, width = frames.shape
    grid = torch.tensor([length // time, height // patch, width // patch])
    # In this order: image, time, row and column of a block of merged patches, row and column within
    # the block; and within a patch colour, time, row, column. The network merges patches that
    # follow each other, so those of a block must.
    split = frames.reshape(
        count,
        length // time,
        time,
        colours,
        grid[1] // merge,
        merge,
        patch,
        grid[2] // merge,
        merge,
        patch,
    ).permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9)
    return split.reshape(-1, colours * time * patch * patch), grid
