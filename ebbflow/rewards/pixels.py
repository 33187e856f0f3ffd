"""Prepare images for the vision transformers of the published rewards: resized, cropped or padded
to a square, standardised as CLIP was trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad

from ebbflow.rewards.base import RewardError

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
"""Of CLIP's training images (2103.00020), red, green, blue, in [0, 1]."""
PROCESSOR_FILE = "preprocessor_config.json"
"""Where transformers keeps how a network's images are prepared."""
FILTERS = {2: "bilinear", 3: "bicubic"}
"""torch's names of Pillow's filters, which the processor names by number."""


def resize_as_bytes(images: np.ndarray, size: int, device: torch.device) -> Tensor:
    """uint8 RGB [N, H, W, 3] -> float32 [N, 3, size, size]: resized as bytes, so every pixel is
    rounded and within its range.
    """
    height, width = _size_of_shorter_edge(size, *images.shape[1:3])
    # Pillow's bicubic on bytes rounds and clips its result; torch's on numbers does neither.
    sized = [
        np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))
        for image in images
    ]
    return standardize_pixels(_crop_center(scale_to_unit_range(np.stack(sized), device), size))


def resize_with_gradient(
    images: Tensor, size: int, margin: Callable[[float], int] = round
) -> Tensor:
    """RGB in [0, 1], [N, 3, H, W] -> float32 [N, 3, size, size], with gradient: the shorter edge
    gets ``size``, antialiased, and the middle remains. Values are neither rounded nor clipped.

    Args:
        margin: how half of an odd number of pixels is rounded; transformers' processor of CLIP
            takes ``math.floor``.
    """
    shape = _size_of_shorter_edge(size, *images.shape[2:])
    return standardize_pixels(
        _crop_center(interpolate(images, shape, mode="bicubic", antialias=True), size, margin)
    )


def letterbox_as_floats(images: np.ndarray, size: int, device: torch.device) -> Tensor:
    """uint8 RGB [N, H, W, 3] -> float32 [N, 3, size, size]: as ``letterbox_with_gradient``."""
    return letterbox_with_gradient(scale_to_unit_range(images, device), size)


def letterbox_with_gradient(images: Tensor, size: int) -> Tensor:
    """RGB in [0, 1], [N, 3, H, W] -> float32 [N, 3, size, size], with gradient: the longer edge
    gets ``size``, antialiased, and black bars fill the rest, so nothing is cut off.

    Source: ``ResizeMaxSize`` of HPSv2's open_clip. It leaves an image alone whose longer edge has
    the size already, and its network then refuses one that is not square; here it gets its bars.
    """
    height, width = images.shape[2:]
    scale = size / max(height, width)
    resized_height, resized_width = round(height * scale), round(width * scale)
    resized = interpolate(images, (resized_height, resized_width), mode="bicubic", antialias=True)
    missing_rows, missing_columns = size - resized_height, size - resized_width
    # Left, right, top, bottom; an odd number of missing pixels goes to the right and the bottom.
    bars = (
        missing_columns // 2,
        missing_columns - missing_columns // 2,
        missing_rows // 2,
        missing_rows - missing_rows // 2,
    )
    return standardize_pixels(pad(resized, bars))


def scale_to_unit_range(images: np.ndarray, device: torch.device) -> Tensor:
    """uint8 RGB [N, H, W, 3] -> float32 [N, 3, H, W] in [0, 1]."""
    return torch.tensor(images, device=device).permute(0, 3, 1, 2).float() / 255


def prepare_with_processor(images: Tensor, processor: dict[str, Any]) -> Tensor:
    """Resize, crop and standardise RGB in [0, 1], [n, 3, height, width], as the processor says,
    with gradient.

    Raises:
        RewardError: it says something that is not known here.
    """
    size = processor.get("size", {})
    mode = FILTERS.get(processor.get("resample", 2))
    edge = size if isinstance(size, int) else size.get("shortest_edge")
    if mode is None or not (edge or {"height", "width"} <= set(size)):
        raise RewardError(
            f"{PROCESSOR_FILE} has size {size} and resample"
            f" {processor.get('resample')}, which cannot be followed; take another network"
        )
    if isinstance(size, int):
        shape = (size, size)
    elif edge:
        shape = _size_of_shorter_edge(edge, *images.shape[2:])
    else:
        shape = (size["height"], size["width"])
    images = interpolate(images, shape, mode=mode, antialias=True)
    if processor.get("do_center_crop"):
        crop = processor["crop_size"]
        height, width = (crop, crop) if isinstance(crop, int) else (crop["height"], crop["width"])
        top = (images.shape[2] - height) // 2
        left = (images.shape[3] - width) // 2
        images = images[..., top : top + height, left : left + width]
    if not processor.get("do_normalize", True):
        return images
    mean, deviation = (
        torch.tensor(processor[key], device=images.device).view(1, 3, 1, 1)
        for key in ("image_mean", "image_std")
    )
    return (images - mean) / deviation


def _size_of_shorter_edge(size: int, height: int, width: int) -> tuple[int, int]:
    # Cut down, not rounded, as torchvision's Resize does: a pixel more would move the crop.
    shorter = min(height, width)
    return int(size * height / shorter), int(size * width / shorter)


def _crop_center(pixels: Tensor, size: int, margin: Callable[[float], int] = round) -> Tensor:
    """The middle; an odd margin is split as torchvision does, by rounding half to even, unless
    ``margin`` rounds otherwise.
    """
    top, left = (margin((edge - size) / 2) for edge in pixels.shape[-2:])
    return pixels[..., top : top + size, left : left + size]


def standardize_pixels(pixels: Tensor) -> Tensor:
    """RGB in [0, 1], [N, 3, H, W] -> mean 0 and deviation 1 over CLIP's training images."""
    mean, std = (pixels.new_tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (pixels - mean) / std
