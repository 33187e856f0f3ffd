"""What pictures look like, whatever they show: numbers that a hacked reward moves and that need no
network.

A reward that is gamed rises while the pictures become flat, grainy, bright or alike. The evaluation
measures these statistics on every sample, and the gate tests that the candidate's are not far from
the champion's (``ebbflow.evaluation.non_inferiority``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import cv2
import numpy as np

from ebbflow.rewards.videos import select_scored_frames

EDGE = 32.0
"""Grey levels per pixel of gradient, from which a pixel lies on an edge."""
THUMBNAIL = 32
"""Longest side in pixels of what pictures are compared by: grain is no difference between two
pictures.
"""
TEXT_HEIGHT = 6
"""Pixels that a line of text has at least."""
TEXT_GAP = 9
"""Pixels across which letters join to a line."""
TEXT_FILL = 0.45
"""Share of its box that a line of text fills at least."""

Statistic = Callable[[np.ndarray], float]
"""From one image, uint8 RGB [height, width, 3], to a number."""


def compute_image_statistics(pictures: np.ndarray) -> dict[str, np.ndarray]:
    """The statistics of ``STATISTICS``, float64 [N] each.

    Args:
        pictures: uint8 RGB images [N, height, width, 3], or videos [N, frames, height, width, 3]:
            the mean over the frames that rewards score.
    """
    videos = pictures if pictures.ndim == 5 else pictures[:, None]
    shown = select_scored_frames(videos.shape[1])
    return {
        name: np.array(
            [np.mean([statistic(frame) for frame in video[shown]]) for video in videos], np.float64
        )
        for name, statistic in STATISTICS.items()
    }


def measure_entropy(image: np.ndarray) -> float:
    """Shannon entropy of the grey levels as a share of 8 bits, 0 to 1 (Gonzalez and Woods, Digital
    Image Processing, ch. 8).
    """
    counts = np.bincount(_convert_to_grey(image).ravel(), minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum() / 8)


def measure_edge_density(image: np.ndarray) -> float:
    """Share of the pixels whose Sobel gradient is steeper than ``EDGE`` grey levels per pixel."""
    grey = _convert_to_grey(image).astype(np.float32)
    # The 3 x 3 kernel weighs a step of one grey level per pixel by 8.
    across, down = (cv2.Sobel(grey, cv2.CV_32F, *order, scale=1 / 8) for order in ((1, 0), (0, 1)))
    return float((np.hypot(across, down) > EDGE).mean())


def measure_brightness(image: np.ndarray) -> float:
    """Mean luma, 0 (black) to 1 (white)."""
    return float(_convert_to_grey(image).mean() / 255)


def measure_saturation(image: np.ndarray) -> float:
    """Mean saturation of HSV, 0 (grey) to 1."""
    return float(cv2.cvtColor(image, cv2.COLOR_RGB2HSV)[..., 1].mean() / 255)


def measure_sharpness(image: np.ndarray) -> float:
    """Standard deviation of the Laplacian, in units of the grey range: small for blur, large for
    grain.

    The variance is the measure of focus of Pech-Pacheco et al., Diatom autofocusing in brightfield
    microscopy (ICPR 2000).
    """
    return float(cv2.Laplacian(_convert_to_grey(image), cv2.CV_32F).std() / 255)


def measure_text_likeness(image: np.ndarray) -> float:
    """Share of the image inside boxes that look like lines of text: wide, filled, of strong and
    close edges.

    Morphological gradient, Otsu's threshold (IEEE Trans. SMC 9, 1979), closing along the line,
    connected components.
    """
    gradient = cv2.morphologyEx(
        _convert_to_grey(image),
        cv2.MORPH_GRADIENT,
        cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (3, 3)),
    )
    level, strokes = cv2.threshold(gradient, 0, 1, cv2.THRESH_BINARY + cv2.THRESH_OTSU)
    if level < EDGE:
        return 0.0
    lines = cv2.morphologyEx(
        strokes, cv2.MORPH_CLOSE, cv2.getStructuringElement(cv2.MORPH_RECT, (TEXT_GAP, 1))
    )
    _, _, boxes, _ = cv2.connectedComponentsWithStats(lines)
    boxes = boxes[1:]  # the first is the background
    width, height, filled = (
        boxes[:, part] for part in (cv2.CC_STAT_WIDTH, cv2.CC_STAT_HEIGHT, cv2.CC_STAT_AREA)
    )
    text = (height >= TEXT_HEIGHT) & (width > height) & (filled > TEXT_FILL * width * height)
    return float((width * height)[text].sum() / gradient.size)


STATISTICS: dict[str, Statistic] = {
    "entropy": measure_entropy,
    "edge_density": measure_edge_density,
    "brightness": measure_brightness,
    "saturation": measure_saturation,
    "sharpness": measure_sharpness,
    "text_likeness": measure_text_likeness,
}


def create_missing_statistics(count: int) -> dict[str, np.ndarray]:
    """The statistics of ``count`` images that nobody saw: NaN."""
    return {name: np.full(count, np.nan) for name in STATISTICS}


def compute_effect_size(values: np.ndarray, mean: float, spread: float) -> float:
    """How far the mean of some values lies from ``mean``, in units of the standard deviation
    ``spread`` (Glass, Primary, secondary, and meta-analysis of research, Educational Researcher 5,
    1976); 0 where there is no spread.
    """
    return (float(values.mean()) - mean) / spread if spread > 0 else 0.0


def compute_chance_effect(count: int, first_count: int) -> float:
    """Effect size that two samples of one distribution rarely exceed: two standard errors of the
    difference of their means.

    Args:
        count, first_count: sizes of the samples.
    """
    return 2 * math.sqrt(1 / count + 1 / first_count)


def make_thumbnails(pictures: np.ndarray) -> np.ndarray:
    """float32 [N, D] in [0, 1]: what pictures (as in ``compute_image_statistics``) are compared by;
    a video by its scored frames.
    """
    videos = pictures if pictures.ndim == 5 else pictures[:, None]
    height, width = videos.shape[2:4]
    share = min(1.0, THUMBNAIL / max(height, width))
    size = max(1, round(width * share)), max(1, round(height * share))
    shown = select_scored_frames(videos.shape[1])
    small = [
        [cv2.resize(frame, size, interpolation=cv2.INTER_AREA) for frame in video[shown]]
        for video in videos
    ]
    return np.asarray(small, np.float32).reshape(len(pictures), -1) / 255


def measure_diversity_within(prompt_ids: Sequence[int], points: np.ndarray) -> np.ndarray:
    """Mean distance of each sample to the others of its prompt, float64 [N]; NaN where there is no
    other.

    Args:
        points: [N, ...], one per sample. The distance of two is the root of their mean squared
            difference.
    """
    ids = np.asarray(prompt_ids)
    flat = points.reshape(len(points), -1).astype(np.float64)
    values = np.full(len(ids), np.nan)
    for prompt in np.unique(ids):
        (rows,) = np.nonzero(ids == prompt)
        if len(rows) > 1:
            apart = np.sqrt(((flat[rows, None] - flat[None, rows]) ** 2).mean(axis=2))
            values[rows] = apart.sum(axis=1) / (len(rows) - 1)
    return values


def measure_diversity_across(points: np.ndarray) -> np.ndarray:
    """Distance of each point, [N, D], to the nearest other one, float64 [N]: 0 for a duplicate; NaN
    where there is one point.
    """
    flat = points.astype(np.float64)
    values = np.full(len(flat), np.nan)
    for index in range(len(flat) if len(flat) > 1 else 0):
        squares = ((flat - flat[index]) ** 2).mean(axis=1)
        squares[index] = np.inf
        values[index] = np.sqrt(squares.min())
    return values


def _convert_to_grey(image: np.ndarray) -> np.ndarray:
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY))
