"""Videos from files that somebody else wrote, as frames at a rate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageSequence

from ebbflow.data.images import ImageError
from ebbflow.recipe.base import sanitize_text

VIDEO_SUFFIXES = (".mp4", ".webm", ".mov", ".mkv", ".avi", ".gif", ".apng")
ANIMATIONS = (".gif", ".apng")
"""Read by Pillow; the others by OpenCV."""
MAX_FRAMES = 100_000
"""Of a video that is read."""


def read_clip(path: Path, frames: int, rate: float) -> np.ndarray | None:
    """Read the first frames of a video at a rate: uint8 RGB [frames, height, width, 3]; None where
    it is too short.

    Args:
        rate: frames a second. Of the video's own frames each time takes the nearest.

    Raises:
        ImageError: the file is no video that can be read.
    """
    read = _read_animation if path.suffix.lower() in ANIMATIONS else _read_video
    clip = read(path, frames, rate)
    return clip if len(clip) == frames else None


def _read_video(path: Path, frames: int, rate: float) -> np.ndarray:
    import cv2

    video = cv2.VideoCapture(str(path))
    try:
        own_rate = video.get(cv2.CAP_PROP_FPS)
        if not video.isOpened() or not own_rate > 0:
            raise ImageError("is no video that can be read; write it again, as MP4 for example")
        wanted = _list_wanted_frames(frames, rate, own_rate)
        chosen: list[np.ndarray] = []
        for index in range(min(wanted[-1] + 1, MAX_FRAMES)):
            read, frame = video.read()
            if not read:
                break
            # A rate above the video's own takes a frame more than once.
            chosen += [cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)] * wanted.count(index)
    finally:
        video.release()
    if not chosen:
        raise ImageError("has no frame that can be read; write it again, as MP4 for example")
    return np.stack(chosen)


def _read_animation(path: Path, frames: int, rate: float) -> np.ndarray:
    try:
        with Image.open(path, formats=["GIF", "PNG"]) as image:
            milliseconds = float(image.info.get("duration") or 100)
            wanted = _list_wanted_frames(frames, rate, 1000 / milliseconds)
            chosen: list[np.ndarray] = []
            for index, frame in enumerate(ImageSequence.Iterator(image)):
                if index > wanted[-1]:
                    break
                chosen += [np.asarray(frame.convert("RGB"))] * wanted.count(index)
    except Exception as error:  # every decoder of Pillow has its own errors
        reason = sanitize_text(str(error), 200)
        raise ImageError(f"is no video that can be read ({reason}); write it again") from None
    return np.stack(chosen)


def _list_wanted_frames(frames: int, rate: float, own_rate: float) -> list[int]:
    """List the numbers of a video's own frames that are nearest to the wanted times.

    Example:
        >>> _list_wanted_frames(4, rate=16, own_rate=24)
        [0, 2, 3, 4]
    """
    return [int(number * own_rate / rate + 0.5) for number in range(frames)]
