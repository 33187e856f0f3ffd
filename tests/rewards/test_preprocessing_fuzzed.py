"""What every reward of images makes of a picture before its network sees it, against the published
processing, at drawn sizes: shapes decide what is cropped, padded and rounded.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ebbflow.rewards.built_in.geneval import find_input_size, prepare_images
from ebbflow.rewards.pixels import (
    MEAN,
    STD,
    letterbox_as_floats,
    resize_as_bytes,
    resize_with_gradient,
    scale_to_unit_range,
)
from ebbflow.rewards.qwen2_vl import resize_to_patch_grid, split_into_patches

CPU = torch.device("cpu")
SIZE = 28
"""Edge of what the network sees."""
BYTE = 1 / 255 / min(STD)
"""What a byte is worth after standardisation, where it is worth most."""
COUNTS = [10, pytest.param(200, marks=pytest.mark.exhaustive)]


def draw_images(count):
    """Pictures of smooth colours away from black and white, so that no resizing is clipped, with
    edges of 12 to 150 pixels: proportions up to 12 : 1.
    """
    rng = np.random.default_rng(0)
    for _ in range(count):
        height, width = (int(edge) for edge in np.exp(rng.uniform(np.log(12), np.log(150), 2)))
        colours = rng.integers(80, 176, (4, 4, 3), dtype=np.uint8)
        yield np.asarray(Image.fromarray(colours).resize((width, height), Image.Resampling.BICUBIC))


def crop_center(image, top, left):
    return image[top : top + SIZE, left : left + SIZE]


def standardize(image):
    """RGB of [0, 1], [H, W, 3] -> [1, 3, H, W]."""
    return torch.from_numpy((image - np.array(MEAN)) / np.array(STD)).float().permute(2, 0, 1)[None]


def assert_close(ours, theirs, bytes_off):
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < bytes_off * BYTE + 1e-5


@pytest.mark.parametrize("count", COUNTS)
def test_clip_with_gradient_sees_what_its_processor_makes(count):
    """``pickscore``, ``clipscore``, ``aesthetic``; without gradient they call the processor."""
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}
    )
    for image in draw_images(count):
        theirs = processor(image, return_tensors="pt").pixel_values
        ours = resize_with_gradient(
            scale_to_unit_range(image[None], CPU), SIZE, margin=lambda edge: int(edge // 1)
        )
        # Its bytes are rounded twice, along each edge.
        assert_close(ours, theirs, 1.5)


@pytest.mark.parametrize("count", COUNTS)
def test_imagereward_sees_the_short_edge_resized_and_the_middle(count):
    """torchvision's Resize and CenterCrop: the long edge is cut down to an integer, the margin
    rounded half to even.
    """
    for image in draw_images(count):
        height, width = image.shape[:2]
        if height <= width:
            size = (int(SIZE * width / height), SIZE)
        else:
            size = (SIZE, int(SIZE * height / width))
        resized = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))
        top = round((size[1] - SIZE) / 2.0)
        left = round((size[0] - SIZE) / 2.0)
        theirs = standardize(crop_center(resized, top, left) / 255)
        assert_close(resize_as_bytes(image[None], SIZE, CPU), theirs, 0)
        with_gradient = resize_with_gradient(scale_to_unit_range(image[None], CPU), SIZE)
        assert_close(with_gradient, theirs, 1.5)


@pytest.mark.parametrize("count", COUNTS)
def test_hps_sees_the_whole_image_between_bars(count):
    """``ResizeMaxSize`` of HPSv2: Pillow's bytes here, for its numbers, and black in the bars."""
    for image in draw_images(count):
        height, width = image.shape[:2]
        scale = SIZE / float(max(height, width))
        new_height, new_width = round(height * scale), round(width * scale)
        resized = np.asarray(
            Image.fromarray(image).resize((new_width, new_height), Image.Resampling.BICUBIC)
        )
        missing_height, missing_width = SIZE - new_height, SIZE - new_width
        rows = (missing_height // 2, missing_height - missing_height // 2)
        columns = (missing_width // 2, missing_width - missing_width // 2)
        padded = np.pad(resized, (rows, columns, (0, 0)))
        assert_close(letterbox_as_floats(image[None], SIZE, CPU), standardize(padded / 255), 1.5)


@pytest.mark.parametrize("count", COUNTS)
def test_qwen2_vl_sees_the_patches_of_its_processor(count):
    """``hpsv3`` and, of each frame, ``videoalign``."""
    bounds = {"min_pixels": 4 * 28 * 28, "max_pixels": 16 * 28 * 28}
    processor = Qwen2VLImageProcessorPil(**bounds)
    config = SimpleNamespace(patch_size=14, spatial_merge_size=2, temporal_patch_size=2)
    for image in draw_images(count):
        theirs = processor(image, return_tensors="pt")
        for given, off in ((image[None], 0), (scale_to_unit_range(image[None], CPU), 1.5)):
            pixels = resize_to_patch_grid(given, **bounds, factor=28, device=CPU)
            # An image is two equal frames.
            patches, grid = split_into_patches(pixels[:, None].repeat(1, 2, 1, 1, 1), config)
            assert grid.tolist() == theirs.image_grid_thw[0].tolist()
            assert_close(patches, theirs.pixel_values, off)


@pytest.mark.parametrize("count", COUNTS)
def test_geneval_sees_the_size_and_the_pixels_of_its_detector(count):
    """MMDetection's Resize with ``keep_ratio`` to (1333, 800), whose edges are rounded, and its Pad
    to multiples of 32 after the standardisation.
    """
    mean = np.array([123.675, 116.28, 103.53])
    deviation = np.array([58.395, 57.12, 57.375])
    rng = np.random.default_rng(1)
    for number in range(count):
        height, width = (16 * int(edge) for edge in rng.integers(16, 97, 2))
        scale = min(1333 / max(height, width), 800 / min(height, width))
        resized = (int(height * scale + 0.5), int(width * scale + 0.5))
        input_size = find_input_size(height, width)
        assert input_size.resized == resized
        assert all(
            edge % 32 == 0 and 0 <= edge - bare < 32
            for edge, bare in zip(input_size.padded, resized, strict=True)
        )
        # A megapixel each: the pixels of a few will do.
        if number % 40 == 0:
            image = np.asarray(Image.fromarray(rng.integers(80, 176, (4, 4, 3), dtype=np.uint8)))
            image = np.asarray(Image.fromarray(image).resize((width, height)))
            theirs = Image.fromarray(image).resize(resized[::-1], Image.Resampling.BILINEAR)
            theirs = (np.asarray(theirs) - mean) / deviation
            pixels = prepare_images(image[None], input_size)[0].permute(1, 2, 0).numpy()
            assert np.abs(pixels[: resized[0], : resized[1]] - theirs).max() < 1e-4
            assert not pixels[resized[0] :].any()
            assert not pixels[:, resized[1] :].any()
