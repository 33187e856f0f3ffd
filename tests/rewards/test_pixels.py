from __future__ import annotations

import numpy as np
import pytest
import torch
from network_cases import some_images
from PIL import Image

from ebbflow.rewards.pixels import (
    MEAN,
    STD,
    letterbox_as_floats,
    resize_as_bytes,
    resize_with_gradient,
    scale_to_unit_range,
)

CPU = torch.device("cpu")


def resize_as_floats(images: np.ndarray, size: int, device: torch.device) -> torch.Tensor:
    return resize_with_gradient(scale_to_unit_range(images, device), size)


BOTH = pytest.mark.parametrize("resized", [resize_as_bytes, resize_as_floats])


def values(pixels: torch.Tensor) -> np.ndarray:
    """Back to [0, 1], [N, H, W, 3]."""
    assert pixels.dtype == torch.float32
    return pixels.permute(0, 2, 3, 1).numpy() * np.array(STD) + np.array(MEAN)


@BOTH
@pytest.mark.parametrize(
    ("height", "width", "top", "left"),
    [(32, 32, 0, 0), (32, 40, 0, 4), (35, 32, 2, 0), (32, 33, 0, 0), (37, 32, 2, 0)],
)
def test_what_has_the_size_is_only_cropped(resized, height, width, top, left):
    images = some_images(2, height, width)
    assert np.allclose(
        values(resized(images, 32, CPU)),
        images[:, top : top + 32, left : left + 32] / 255,
        atol=1e-6,
    )


@BOTH
@pytest.mark.parametrize(("height", "width"), [(64, 96), (20, 20), (33, 100), (224, 65)])
def test_the_shorter_edge_gets_the_size_and_the_middle_remains(resized, height, width):
    ramp = np.linspace(0, 255, width)[None, :, None] * np.ones((height, 1, 3))
    got = values(resized(ramp.round().astype(np.uint8)[None], 32, CPU))
    assert got.shape == (1, 32, 32, 3)
    scale = min(height, width) / 32
    middle = (width - 1) / 2 + (np.arange(32) - 15.5) * scale
    inside = (middle > 2 * scale) & (middle < width - 1 - 2 * scale)
    assert np.abs(got[0, 16, inside, 0] - middle[inside] / (width - 1)).max() < max(0.02, 1 / width)


def test_bytes_are_resized_by_pillow():
    images = some_images(2, 70, 91)
    wanted = [
        np.asarray(Image.fromarray(image).resize((41, 32), Image.Resampling.BICUBIC))[:, 4:36]
        for image in images
    ]
    assert np.allclose(values(resize_as_bytes(images, 32, CPU)), np.stack(wanted) / 255, atol=1e-6)


def test_numbers_are_antialiased_and_may_leave_their_range():
    stripes = np.zeros((1, 128, 128, 3), np.uint8)
    stripes[:, :, ::4] = 255
    assert np.abs(values(resize_as_floats(stripes, 32, CPU))[0, 4:-4, 4:-4] - 0.25).max() < 0.01
    edge = np.zeros((1, 16, 16, 3), np.uint8)
    edge[:, :, 8:] = 255
    assert values(resize_as_floats(edge, 32, CPU)).max() > 1.02
    assert values(resize_as_bytes(edge, 32, CPU)).max() <= 1 + 1e-6


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns"),
    [
        (64, 64, slice(0, 32), slice(0, 32)),
        # 704 x 1280 becomes 17.6, so 18 of 32 rows, as HPSv2 rounds.
        (704, 1280, slice(7, 25), slice(0, 32)),
        (1280, 704, slice(0, 32), slice(7, 25)),
        # 15 missing columns: seven on the left, eight on the right.
        (64, 34, slice(0, 32), slice(7, 24)),
        (20, 32, slice(6, 26), slice(0, 32)),
    ],
)
def test_a_letterbox_keeps_the_whole_image_between_black_bars(height, width, rows, columns):
    images = np.full((2, height, width, 3), 200, np.uint8)
    expected = np.zeros((2, 32, 32, 3))
    expected[:, rows, columns] = 200 / 255
    assert np.allclose(values(letterbox_as_floats(images, 32, CPU)), expected, atol=1e-6)


def test_a_letterbox_of_a_square_is_the_resized_square():
    images = some_images(2, 70, 70)
    assert torch.equal(letterbox_as_floats(images, 32, CPU), resize_as_floats(images, 32, CPU))
