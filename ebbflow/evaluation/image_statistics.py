"""Statistics of what pictures look like, whatever they show: numbers that a hacked reward moves and
that need no network.

A reward that is gamed rises while the pictures become flat, grainy, bright or alike. The evaluation
measures these statistics on every sample, and the gate tests that the candidate's are not far from
the champion's (``ebbflow.evaluation.non_inferiority``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
PAIRS_AT_ONCE = 2**22
"""Pairs of pictures that are compared in one product: 32 MiB of distances."""

STATISTICS = (
    "entropy",
    "edge_density",
    "brightness",
    "saturation",
    "sharpness",
    "text_likeness",
)


def compute_image_statistics(pictures: np.ndarray) -> dict[str, np.ndarray]:
    """Compute the statistics of ``STATISTICS``, float64 [N] each.

    Args:
        pictures: uint8 RGB images [N, height, width, 3], or videos [N, frames, height, width, 3]:
            the mean over the frames that rewards score.
    """
    if pictures.ndim == 4:
        rows = [measure_image(image) for image in pictures]
    else:
        # The frames that rewards see: others may change freely without a hacked reward.
        frames = select_scored_frames(pictures.shape[1])
        rows = []
        for video in pictures:
            measured = zip(*map(measure_image, video[frames]), strict=True)  # by statistic
            rows.append(tuple(float(np.mean(values)) for values in measured))
    columns = np.array(rows, np.float64).reshape(-1, len(STATISTICS)).T
    return dict(zip(STATISTICS, np.ascontiguousarray(columns), strict=True))


def measure_image(image: np.ndarray) -> tuple[float, ...]:
    """Measure the ``STATISTICS`` of one image, uint8 RGB [height, width, 3].

    - entropy: Shannon entropy of the grey levels as a share of 8 bits, 0 to 1 (Gonzalez and Woods,
      Digital Image Processing, ch. 8);
    - edge_density: share of the pixels whose Sobel gradient is steeper than ``EDGE`` grey levels
      per pixel;
    - brightness: mean luma, 0 (black) to 1 (white);
    - saturation: mean saturation of HSV, 0 (grey) to 1;
    - sharpness: standard deviation of the Laplacian, in units of the grey range: small for blur,
      large for grain. The variance is the measure of focus of Pech-Pacheco et al., Diatom
      autofocusing in brightfield microscopy (ICPR 2000);
    - text_likeness: ``measure_text_likeness``.
    """
    grey = np.asarray(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY))
    counts = np.bincount(grey.ravel(), minlength=256)
    shares = counts[counts > 0] / counts.sum()  # 0 log 0 is 0
    entropy = float(-(shares * np.log2(shares)).sum() / 8)

    # The 3 x 3 kernel weighs a step of one grey level per pixel by 8.
    levels = grey.astype(np.float32)
    across = cv2.Sobel(levels, cv2.CV_32F, 1, 0, scale=1 / 8)
    down = cv2.Sobel(levels, cv2.CV_32F, 0, 1, scale=1 / 8)
    edge_density = float((np.hypot(across, down) > EDGE).mean())

    brightness = float(grey.mean() / 255)
    saturation = float(cv2.cvtColor(image, cv2.COLOR_RGB2HSV)[..., 1].mean() / 255)
    sharpness = float(cv2.Laplacian(grey, cv2.CV_32F).std() / 255)
    text_likeness = measure_text_likeness(grey)
    return entropy, edge_density, brightness, saturation, sharpness, text_likeness


def measure_text_likeness(grey: np.ndarray) -> float:
    """Measure the share of an image, uint8 [height, width], inside boxes that look like lines of
    text: wide, filled, of strong and close edges.
    """
    # The outlines of strokes: the morphological gradient, dilation minus erosion.
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
    order = np.argsort(ids, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(ids[order])) + 1):
        if len(rows) > 1:
            group = flat[rows]  # [S, D] for the S samples of a prompt
            # Row by row: all pairs at once would be [S, S, D].
            for row in rows:
                distances = np.sqrt(((flat[row] - group) ** 2).mean(axis=1))
                values[row] = distances.sum() / (len(rows) - 1)  # 0 to itself, hence S - 1
    return values


def measure_diversity_across(points: np.ndarray) -> np.ndarray:
    """Measure the distance of each point, [N, D], to the nearest other one, float64 [N]: 0 for a
    duplicate; NaN where there is one point.
    """
    # The nearest and not the mean: a policy that collapsed to a few pictures keeps their mean
    # distance.
    flat = points.astype(np.float64)
    count = len(flat)
    if count < 2:
        return np.full(count, np.nan)
    norms = (flat**2).sum(axis=1)
    nearest = np.empty(count, np.int64)
    rows_at_once = max(1, PAIRS_AT_ONCE // count)
    for start in range(0, count, rows_at_once):
        rows = np.arange(start, min(start + rows_at_once, count))
        # |a - b|^2 = |a|^2 + |b|^2 - 2 ab, whose first term is the same for all b: [B, N].
        ranks = norms - 2 * (flat[rows] @ flat.T)
        ranks[rows - start, rows] = np.inf
        nearest[rows] = ranks.argmin(axis=1)
    # The products only choose the pair: where two pictures are almost equal, they cancel.
    distances: np.ndarray = np.sqrt(((flat - flat[nearest]) ** 2).mean(axis=1))
    return distances
