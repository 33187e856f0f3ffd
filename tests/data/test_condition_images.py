"""Condition images: what a prompt file may name or hold, and what becomes of it."""

from __future__ import annotations

import io
import os
import struct
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ebbflow.data import images
from ebbflow.data.images import ImageError, load_condition_image, split_condition_images
from ebbflow.data.prompt_files import read_prompt_file
from ebbflow.data.prompts import PromptError

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8)


def encoded(
    image: Image.Image | np.ndarray = PIXELS, kind: str = "PNG", **options: object
) -> bytes:
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(
        buffer, kind, **options
    )
    return buffer.getvalue()


def pixels(png: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
        assert image.mode == "RGB"
        assert not image.info
        return np.asarray(image)


def header_alone(width: int, height: int) -> bytes:
    """A PNG that says it is that large and holds nothing."""
    chunks = [
        (b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"")),
        (b"IEND", b""),
    ]
    parts = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_the_same_pixels_give_the_same_bytes_without_what_was_said_beside_them(
    tmp_path: Path,
) -> None:
    said = PngInfo()
    said.add_text("parameters", "who made it, and how")
    plain = encoded()
    chatty = encoded(pnginfo=said, dpi=(300, 300), icc_profile=b"x" * 128, compress_level=1)
    assert plain != chatty
    stored = load_condition_image(plain, tmp_path)
    assert (
        stored == load_condition_image(chatty, tmp_path) == load_condition_image(stored, tmp_path)
    )
    assert np.array_equal(pixels(stored), PIXELS)


@pytest.mark.parametrize(
    ("kind", "options"), [("JPEG", {"quality": 95}), ("WEBP", {"lossless": True})]
)
def test_other_formats_keep_the_pixels_that_they_decode_to(
    tmp_path: Path, kind: str, options: dict[str, object]
) -> None:
    file = encoded(kind=kind, **options)
    expected = np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
    assert np.array_equal(pixels(load_condition_image(file, tmp_path)), expected)


def test_what_a_camera_held_sideways_is_turned_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise
    assert np.array_equal(
        pixels(load_condition_image(encoded(exif=exif), tmp_path)), np.rot90(PIXELS, -1)
    )


def test_grey_and_transparent_images_become_rgb(tmp_path: Path) -> None:
    grey = PIXELS[..., 0]
    alpha = np.dstack([PIXELS, PIXELS[..., 1]])
    assert np.array_equal(
        pixels(load_condition_image(encoded(grey), tmp_path)), np.repeat(grey[..., None], 3, axis=2)
    )
    assert np.array_equal(pixels(load_condition_image(encoded(alpha), tmp_path)), PIXELS)


def test_a_path_is_relative_to_the_folder_or_absolute_below_it(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.png").write_bytes(encoded())
    (tmp_path / "link.png").symlink_to("deep/a.png")
    (tmp_path / "alias").symlink_to(tmp_path)
    for value in (
        "deep/a.png",
        "deep/../deep/a.png",
        str(tmp_path / "deep" / "a.png"),
        "link.png",
        "alias/link.png",
    ):
        assert np.array_equal(pixels(load_condition_image(value, tmp_path)), PIXELS)
        assert np.array_equal(pixels(load_condition_image(value, tmp_path / "alias")), PIXELS)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder, beside an image that must not be read from it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(encoded())
    (tmp_path / "mine too").mkdir()
    (tmp_path / "mine too" / "secret.png").write_bytes(encoded())
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "up").symlink_to("..")
    return folder


@pytest.mark.parametrize(
    "value",
    ["../secret.png", "../mine too/secret.png", "link.png", "up/secret.png", "/etc/passwd", ".."],
)
def test_nothing_outside_the_folder_is_read(outside: Path, value: str) -> None:
    with pytest.raises(ImageError, match="lies outside .*; move the image into that folder"):
        load_condition_image(value, outside)


def test_an_absolute_path_to_the_outside_is_refused_too(outside: Path) -> None:
    with pytest.raises(ImageError, match="lies outside"):
        load_condition_image(str(outside.parent / "secret.png"), outside)


def test_what_is_no_file_there_is_said_with_what_a_uri_means(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "round").symlink_to("round")
    for value in ("none.png", ".", "pipe.png", "round"):
        with pytest.raises(
            ImageError,
            match="From a URI only that file is fetched; there put the images' bytes into Parquet",
        ):
            load_condition_image(value, tmp_path)
    for value in ("a\0b.png", "x" * 5000):
        with pytest.raises(ImageError, match="is no valid path"):
            load_condition_image(value, tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no image",
        encoded()[:-40],
        encoded(kind="GIF"),
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        header_alone(4, 4),
    ],
    ids=["nothing", "text", "cut", "gif", "eps", "hollow"],
)
def test_what_is_no_image_is_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.png").write_bytes(content)
    for value in (content, "a.png"):
        with pytest.raises(ImageError, match="is no PNG or JPEG or WEBP image that can be read"):
            load_condition_image(value, tmp_path)


@pytest.mark.parametrize("size", [(8001, 8000), (30_000, 30_000)])
def test_what_would_unpack_to_gigabytes_is_refused_unread(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    with pytest.raises(ImageError, match="(is too large|has) .*pixels"):
        load_condition_image(header_alone(*size), tmp_path)


def test_the_largest_image_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 6 * 9)
    assert np.array_equal(pixels(load_condition_image(encoded(), tmp_path)), PIXELS)
    with pytest.raises(ImageError, match=r"has 10 x 6 pixels, more than 54; make it smaller"):
        load_condition_image(encoded(np.zeros((6, 10, 3), np.uint8)), tmp_path)


def test_sixteen_bits_are_refused_rather_than_cut_off(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="greys of 16 bits"):
        load_condition_image(
            encoded(Image.fromarray(np.arange(16, dtype=np.uint16).reshape(4, 4) * 4000)), tmp_path
        )


@given(st.data())
def test_a_damaged_image_is_read_or_refused(data: st.DataObject) -> None:
    content = bytearray(encoded(kind=data.draw(st.sampled_from(["PNG", "JPEG", "WEBP"]))))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        try:
            stored = load_condition_image(bytes(content), Path(folder))
        except ImageError:
            return
    assert pixels(stored).ndim == 3


def test_several_images_are_their_png_files_after_each_other(tmp_path: Path) -> None:
    other = PIXELS[:4, ::-1]
    (tmp_path / "other.jpg").write_bytes(encoded(other, "JPEG"))
    stored = load_condition_image([encoded(), "other.jpg"], tmp_path)
    first, second = split_condition_images(stored)
    assert first == load_condition_image(encoded(), tmp_path)
    assert second == load_condition_image("other.jpg", tmp_path)
    assert stored == first + second
    # Read again, as from a request to a server, and by a program that looks at one image.
    assert load_condition_image(stored, tmp_path) == stored
    assert np.array_equal(pixels(stored), PIXELS)


def test_bytes_after_the_end_of_a_png_are_no_further_image(tmp_path: Path) -> None:
    stored = load_condition_image(encoded() + b"left by a camera", tmp_path)
    assert stored == load_condition_image(encoded(), tmp_path)
    assert split_condition_images(encoded() + b"rest") == [encoded()]


def test_a_second_image_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="^at position 2 is no PNG .* can be read"):
        load_condition_image(encoded() + encoded()[:-30], tmp_path)
    with pytest.raises(ImageError, match="is an empty list; name an image"):
        load_condition_image([], tmp_path)


def test_a_prompt_file_names_several_images_in_a_list(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(encoded(PIXELS if name == "a.png" else PIXELS[:4]))
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "put the cup on the table", "image": ["a.png", "b.png"]}\n')
    (row,) = read_prompt_file(file)[0]
    assert row.image == load_condition_image(["a.png", "b.png"], tmp_path)
    file.write_text('{"prompt": "put the cup on the table", "image": ["a.png", 3]}\n')
    with pytest.raises(PromptError, match="has 3, which is no image; write paths"):
        read_prompt_file(file)
    file.write_text('{"prompt": "put the cup on the table", "image": ["a.png", "no.png"]}\n')
    with pytest.raises(PromptError, match="at position 2 "):
        read_prompt_file(file)
