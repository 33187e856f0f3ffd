"""Statistics of what pictures look like, whatever they show: numbers that a hacked reward moves and
that need no network.

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
    """Compute the statistics of ``STATISTICS``, float64 [N] each.

    Args:
        pictures: uint8 RGB images [N, height, width, 3], or videos [N, frames, height, width, 3]:
            the mean over the frames that rewards score.
    """
    videos = pictures if pictures.ndim == 5 else pictures[:, None]  # an image is a video of a frame
    # The frames that rewards see: others may change freely without a hacked reward.
    frames = select_scored_frames(videos.shape[1])
    columns = {}
    for name, statistic in STATISTICS.items():
        means = [np.mean([statistic(frame) for frame in video[frames]]) for video in videos]
        columns[name] = np.array(means, np.float64)
    return columns


def measure_entropy(image: np.ndarray) -> float:
    """Measure the Shannon entropy of the grey levels as a share of 8 bits, 0 to 1 (Gonzalez and
    Woods, Digital Image Processing, ch. 8).
    """
    counts = np.bincount(_convert_to_grey(image).ravel(), minlength=256)
    shares = counts[counts > 0] / counts.sum()  # 0 log 0 is 0
    return float(-(shares * np.log2(shares)).sum() / 8)


def measure_edge_density(image: np.ndarray) -> float:
    """Measure the share of the pixels whose Sobel gradient is steeper than ``EDGE`` grey levels per
    pixel.
    """
    grey = _convert_to_grey(image).astype(np.float32)
    # The 3 x 3 kernel weighs a step of one grey level per pixel by 8.
    across = cv2.Sobel(grey, cv2.CV_32F, 1, 0, scale=1 / 8)
    down = cv2.Sobel(grey, cv2.CV_32F, 0, 1, scale=1 / 8)
    return float((np.hypot(across, down) > EDGE).mean())


def measure_brightness(image: np.ndarray) -> float:
    """Measure the mean luma, 0 (black) to 1 (white)."""
    return float(_convert_to_grey(image).mean() / 255)


def measure_saturation(image: np.ndarray) -> float:
    """Measure the mean saturation of HSV, 0 (grey) to 1."""
    return float(cv2.cvtColor(image, cv2.COLOR_RGB2HSV)[..., 1].mean() / 255)


def measure_sharpness(image: np.ndarray) -> float:
    """Measure the standard deviation of the Laplacian, in units of the grey range: small for blur,
    large for grain.

    The variance is the measure of focus of Pech-Pacheco et al., Diatom autofocusing in brightfield
    microscopy (ICPR 2000).
    """
    return float(cv2.Laplacian(_convert_to_grey(image), cv2.CV_32F).std() / 255)


def measure_text_likeness(image: np.ndarray) -> float:
    """Measure the share of the image inside boxes that look like lines of text: wide, filled, of
    strong and close edges.
    """
    # The outlines of strokes: the morphological gradient, dilation minus erosion.
    grey = _convert_to_grey(image)
    disc = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (3, 3))
    gradient = cv2.morphologyEx(grey, cv2.MORPH_GRADIENT, disc)

    # Otsu's threshold (IEEE Trans. SMC 9, 1979) finds two classes in any image, a flat one as well:
    # a threshold below EDGE parts noise from noise.
    level, strokes = cv2.threshold(gradient, 0, 1, cv2.THRESH_BINARY + cv2.THRESH_OTSU)
    if level < EDGE:
        return 0.0

    # Closing along the line joins letters to one connected component for each line.
    row = cv2.getStructuringElement(cv2.MORPH_RECT, (TEXT_GAP, 1))
    lines = cv2.morphologyEx(strokes, cv2.MORPH_CLOSE, row)
    _, _, boxes, _ = cv2.connectedComponentsWithStats(lines)
    boxes = boxes[1:]  # the first is the background
    width = boxes[:, cv2.CC_STAT_WIDTH]
    height = boxes[:, cv2.CC_STAT_HEIGHT]
    filled = boxes[:, cv2.CC_STAT_AREA]
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
    """Create the statistics of ``count`` images that nobody saw: NaN."""
    return {name: np.full(count, np.nan) for name in STATISTICS}


def compute_effect_size(values: np.ndarray, mean: float, spread: float) -> float:
    """Compute how far the mean of some values lies from ``mean``, in units of the standard
    deviation ``spread`` (Glass, Primary, secondary, and meta-analysis of research, Educational
    Researcher 5, 1976); 0 where there is no spread.
    """
    return (float(values.mean()) - mean) / spread if spread > 0 else 0.0


def compute_chance_effect(count: int, first_count: int) -> float:
    """Compute the effect size that two samples of one distribution rarely exceed: two standard
    errors of the difference of their means.

    Args:
        count, first_count: sizes of the samples.
    """
    return 2 * math.sqrt(1 / count + 1 / first_count)


def make_thumbnails(pictures: np.ndarray) -> np.ndarray:
    """Return float32 [N, D] in [0, 1], what pictures (as in ``compute_image_statistics``) are
    compared by; a video by its scored frames.
    """
    videos = pictures if pictures.ndim == 5 else pictures[:, None]
    height, width = videos.shape[2:4]
    share = min(1.0, THUMBNAIL / max(height, width))
    size = max(1, round(width * share)), max(1, round(height * share))
    frames = select_scored_frames(videos.shape[1])
    # INTER_AREA averages all pixels of an area; others sample some, and grain would get through.
    small = [
        [cv2.resize(frame, size, interpolation=cv2.INTER_AREA) for frame in video[frames]]
        for video in videos
    ]
    return np.asarray(small, np.float32).reshape(len(pictures), -1) / 255


def measure_diversity_within(prompt_ids: Sequence[int], points: np.ndarray) -> np.ndarray:
    """Measure the mean distance of each sample to the others of its prompt, float64 [N]; NaN where
    there is no other.

    Example:
        prompt_ids = [5, 5, 9] with points [[0.], [.4], [.7]] gives [.4, .4, NaN].

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
            # [S, S] for the S samples of a prompt, 0 on the diagonal, hence S - 1.
            distances = np.sqrt(((flat[rows, None] - flat[None, rows]) ** 2).mean(axis=2))
            values[rows] = distances.sum(axis=1) / (len(rows) - 1)
    return values


def measure_diversity_across(points: np.ndarray) -> np.ndarray:
    """Measure the distance of each point, [N, D], to the nearest other one, float64 [N]: 0 for a
    duplicate; NaN where there is one point.
    """
    # The nearest and not the mean: a policy that collapsed to a few pictures keeps their mean
    # distance.
    flat = points.astype(np.float64)
    values = np.full(len(flat), np.nan)
    if len(flat) < 2:
        return values
    # Row by row: all pairs at once would be [N, N, D].
    for index in range(len(flat)):
        squares = ((flat - flat[index]) ** 2).mean(axis=1)
        squares[index] = np.inf
        values[index] = np.sqrt(squares.min())
    return values


def _convert_to_grey(image: np.ndarray) -> np.ndarray:
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY))
