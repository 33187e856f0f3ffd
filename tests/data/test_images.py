"""Videos as animated PNG: every pixel of every frame comes back, and others than Pillow play
them."""

from __future__ import annotations

import io
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from ebbflow.data.images import (
    decode_pngs,
    encode_pngs,
    iterate_png_chunks,
    load_condition_image,
)

FEW = st.integers(1, 4)
VIDEOS = arrays.arrays(
    np.uint8,
    st.tuples(st.integers(1, 2), FEW, FEW, FEW, st.just(3)),
    elements=st.sampled_from([0, 1, 128, 255]) | st.integers(0, 255),
)


def chunks(png: bytes) -> list[bytes]:
    """The names of a PNG's chunks, in order."""
    names = []
    offset = 8
    while offset < len(png):
        names.append(png[offset + 4 : offset + 8])
        offset += 12 + int.from_bytes(png[offset : offset + 4])
    return names


@given(VIDEOS, st.data())
def test_videos_are_kept_losslessly(videos: np.ndarray, data: st.DataObject) -> None:
    frames = data.draw(st.lists(st.integers(0, videos.shape[1] - 1), min_size=1, max_size=8))
    repeated = videos[:, frames]  # some frames equal their neighbours
    assert np.array_equal(decode_pngs(encode_pngs(repeated)), repeated)


@pytest.mark.parametrize("value", [0, 7, 255])
@pytest.mark.parametrize("frames", [1, 2, 81])
def test_a_video_that_stands_still_keeps_its_frames(value: int, frames: int) -> None:
    still = np.full((2, frames, 5, 4, 3), value, np.uint8)
    pngs = encode_pngs(still)
    assert np.array_equal(decode_pngs(pngs), still)
    assert [chunks(png).count(b"fcTL") for png in pngs] == [frames] * 2


def test_another_decoder_sees_the_same_frames_at_their_pace() -> None:
    video = np.random.default_rng(0).integers(0, 256, (1, 5, 12, 20, 3), np.uint8)
    video[:, 2] = video[:, 1]
    is_animation, animation = cv2.imdecodeanimation(np.frombuffer(encode_pngs(video)[0], np.uint8))
    assert is_animation
    assert np.array_equal(np.stack(animation.frames)[..., 2::-1], video[0])
    assert list(animation.durations) == pytest.approx([1000 / 16] * 5, abs=1)
    assert animation.loop_count == 0


def test_what_knows_no_animations_shows_the_first_frame() -> None:
    video = np.random.default_rng(0).integers(0, 256, (1, 3, 6, 8, 3), np.uint8)
    image = cv2.imdecode(np.frombuffer(encode_pngs(video)[0], np.uint8), cv2.IMREAD_COLOR_RGB)
    assert np.array_equal(image, video[0, 0])


def test_images_are_plain_pngs_byte_for_byte() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 6, 8, 3), np.uint8)
    for image, png in zip(images, encode_pngs(images), strict=True):
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="PNG", compress_level=1)
        assert png == buffer.getvalue()
        assert chunks(png) == [b"IHDR", b"IDAT", b"IEND"]


def test_samples_are_compressed_at_the_fastest_level_and_images_to_edit_keep_theirs() -> None:
    image = np.random.default_rng(0).integers(0, 256, (1, 6, 8, 3), np.uint8)
    (sample,) = encode_pngs(image)
    condition = load_condition_image(sample, Path())
    # The two bits after the first byte of a zlib stream name its level (RFC 1950): 0 the fastest,
    # 2 the usual one.
    assert [read_pixel_data(png)[1] >> 6 for png in (sample, condition)] == [0, 2]


def read_pixel_data(png: bytes) -> bytes:
    """Return the data of the first IDAT chunk."""
    chunk = next(data for name, data in iterate_png_chunks(png) if name == b"IDAT")
    return chunk[8:-4]


def test_videos_of_any_memory_layout_are_the_same_video() -> None:
    video = np.random.default_rng(0).integers(0, 256, (2, 3, 6, 8, 3), np.uint8)
    moved = np.ascontiguousarray(np.moveaxis(video, -1, 1)).transpose(0, 2, 3, 4, 1)
    assert not moved.flags.c_contiguous
    assert encode_pngs(moved) == encode_pngs(video)
