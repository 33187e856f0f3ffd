"""Images as PNG, videos as animated PNG, and back; and images from files that somebody else wrote.

PNG is lossless, so a score never depends on whether a sample was stored.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from struct import pack, unpack_from

import numpy as np
from PIL import Image, ImageOps, ImageSequence
from PIL.PngImagePlugin import getchunks, putchunk

from ebbflow.recipe.base import sanitize_text
from ebbflow.storage.disk import PathError, resolve_inside

FRAMES_PER_SECOND = 16
"""How fast a stored video is played; nothing else depends on it."""
COMPRESSION = 1
"""zlib's fastest level: a tenth more bytes than the usual one for two thirds of its seconds or
less, and each sample is encoded once and read once or twice.
"""
CONDITION_COMPRESSION = 6
"""zlib's usual level, for images to edit: the digest of a prompt table, which holds their bytes,
tells runs apart.
"""
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
MAX_PIXELS = 64_000_000
"""Of an image that somebody else wrote: a file of kilobytes can unpack to one that fills memory."""


class ImageError(ValueError):
    """An image that cannot be used: the predicate of a sentence about the value, with the fix."""


def encode_pngs(pictures: np.ndarray, compression: int = COMPRESSION) -> list[bytes]:
    """PNG bytes of uint8 RGB images [N, height, width, 3], animated ones of videos [N, frames,
    height, width, 3].

    Args:
        compression: zlib's level, 0 to 9.
    """
    encode = _encode_video if pictures.ndim == 5 else _encode_image
    return [encode(picture, compression) for picture in pictures]


def _encode_image(image: np.ndarray, compression: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", compress_level=compression)
    return buffer.getvalue()


def _encode_video(video: np.ndarray, compression: int) -> bytes:
    """Animated PNG (PNG Specification, Third Edition) with every frame whole.

    Pillow's own writer would make one longer frame of equal neighbours, and no animation of a
    single frame.
    """
    height, width = video.shape[1:3]
    buffer = io.BytesIO()
    # fcTL and fdAT chunks share one sequence of numbers, which has to be without gaps.
    sequence_numbers = count()
    buffer.write(PNG_SIGNATURE)
    for index, frame in enumerate(video):
        chunks = getchunks(Image.fromarray(frame), compress_level=compression)
        if index == 0:
            putchunk(buffer, b"IHDR", chunks[0][1])
            # Number of frames; 0 plays means without end.
            putchunk(buffer, b"acTL", pack(">2I", len(video), 0))
        # Number, size, offset, seconds as a fraction; the frame replaces the one before.
        putchunk(
            buffer,
            b"fcTL",
            pack(
                ">5I2H2B", next(sequence_numbers), width, height, 0, 0, 1, FRAMES_PER_SECOND, 0, 0
            ),
        )
        pixels = b"".join(data for name, data, _ in chunks if name == b"IDAT")
        if index == 0:
            # Programs that know no animations show this frame as a still.
            putchunk(buffer, b"IDAT", pixels)
        else:
            putchunk(buffer, b"fdAT", pack(">I", next(sequence_numbers)), pixels)
    putchunk(buffer, b"IEND")
    return buffer.getvalue()


def decode_pngs(pictures: Sequence[bytes]) -> np.ndarray:
    """uint8 RGB [N, height, width, 3] of PNG images of one size, [N, frames, height, width, 3] of
    animated ones.
    """
    return np.stack([_decode_picture(picture) for picture in pictures])


def _decode_picture(picture: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(picture)) as image:
        if is_animated_image(image):
            return np.stack(
                [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]
            )
        return np.asarray(image.convert("RGB"))


def iterate_png_chunks(picture: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(name, all bytes) of each chunk of a PNG file, unchecked; the last is cut off where the file
    is.

    Raises:
        ImageError: the file does not begin as PNG files do.
    """
    if not picture.startswith(PNG_SIGNATURE):
        raise ImageError("is no PNG file; write it as one")
    # A chunk: 4 bytes of length, 4 of name, the data, 4 of checksum. The loop ends at IEND, or at a
    # file that is cut off, whatever length its last chunk claims.
    start = len(PNG_SIGNATURE)
    name = b""
    while name != b"IEND" and start + 8 <= len(picture):
        length, name = unpack_from(">I4s", picture, start)
        yield name, picture[start : start + 12 + length]
        start += 12 + length


def is_animated(picture: bytes) -> bool:
    """Whether PNG bytes are a video: an animated PNG."""
    with Image.open(io.BytesIO(picture), formats=["PNG"]) as image:
        return is_animated_image(image)


def is_animated_image(image: Image.Image) -> bool:
    """Whether an opened PNG file is an animation."""
    # Pillow's is_animated is False for one frame. Only animations say how often they are played.
    return "loop" in image.info


def load_condition_image(value: str | bytes | Sequence[str | bytes], folder: Path) -> bytes:
    """The PNG, RGB without metadata, of an image to edit: an encoded image or the path of one. Of
    several images, their PNG files after each other (``split_condition_images``).

    The pixels are those of diffusers' ``load_image``: turned as EXIF says, without alpha; the first
    of an animation.

    Raises:
        ImageError: as ``read_image``; or there is none.
    """
    if isinstance(value, bytes) and value.startswith(PNG_SIGNATURE):
        value = split_condition_images(value)
    values = [value] if isinstance(value, str | bytes) else value
    if not values:
        raise ImageError("is an empty list; name an image, or leave it out")
    pngs = []
    for position, item in enumerate(values, 1):
        try:
            image = read_image(item, folder, ("PNG", "JPEG", "WEBP"), upright=True)
        except ImageError as error:
            if len(values) == 1:
                raise
            raise ImageError(f"at position {position} {error}") from None
        pngs += encode_pngs(image[None], CONDITION_COMPRESSION)
    return b"".join(pngs)


def split_condition_images(pictures: bytes) -> list[bytes]:
    """The PNG files that are after each other in ``load_condition_image``'s bytes.

    A program that knows nothing of this reads the first one.

    Raises:
        ImageError: what is there is no PNG file.
    """
    files = []
    while pictures:
        size = len(PNG_SIGNATURE) + sum(len(chunk) for _, chunk in iterate_png_chunks(pictures))
        files.append(pictures[:size])
        pictures = pictures[size:]
        # Some programs leave bytes after the end of a file, which no reader looks at.
        if not pictures.startswith(PNG_SIGNATURE):
            break
    return files


def read_image(
    value: str | bytes,
    folder: Path,
    formats: tuple[str, ...] = ("PNG", "JPEG"),
    upright: bool = False,
) -> np.ndarray:
    """uint8 RGB [height, width, 3] of an encoded image or of an image file in ``folder`` or below.

    Args:
        value: the bytes of a file, or the path of one, absolute or relative to ``folder``.
        formats: as Pillow names them.
        upright: turn the image as EXIF says.

    Raises:
        ImageError: there is no such image, it cannot be read, is too large, or lies outside the
            folder.
    """
    source = io.BytesIO(value) if isinstance(value, bytes) else _image_path(value, folder)
    try:
        with Image.open(source, formats=formats) as image:
            # Opening reads the header alone; the pixels are unpacked by what follows.
            _check_pixels(image)
            upright_image = ImageOps.exif_transpose(image) if upright else image
            return np.asarray(upright_image.convert("RGB"))
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError(f"is too large ({error}); make it smaller") from None
    except Exception as error:  # every decoder of Pillow has its own errors
        reason = sanitize_text(str(error), 200)
        raise ImageError(
            f"is no {' or '.join(formats)} image that can be read ({reason}); write it again"
        ) from None


def _check_pixels(image: Image.Image) -> None:
    """Before an image is decoded: that memory is bounded and nothing is lost on the way to 8-bit
    RGB.
    """
    if image.width * image.height > MAX_PIXELS:
        raise ImageError(
            f"has {image.width} x {image.height} pixels, more than {MAX_PIXELS:,}; make it smaller"
        )
    # Modes I, I;16 and I;16B, of which convert("RGB") would lose half without a word.
    if image.mode.startswith("I"):
        raise ImageError("has greys of 16 bits, of which 8 would be cut off; write it with 8 bits")


def _image_path(value: str, folder: Path) -> Path:
    # A file of prompts comes from elsewhere; it must not read any picture of this machine.
    try:
        path = resolve_inside(folder, value)
        exists = path.is_file()
    except PathError:
        raise ImageError(
            f"lies outside {folder}; move the image into that folder or below it"
        ) from None
    except (OSError, ValueError) as error:
        raise ImageError(
            f"is no valid path ({getattr(error, 'strerror', None) or error}); correct it"
        ) from None
    if not exists:
        raise ImageError(
            f"is no image file in {folder}. Paths are relative to the file that names them. From a"
            " URI only that file is fetched; there put the images' bytes into Parquet"
        )
    return path
