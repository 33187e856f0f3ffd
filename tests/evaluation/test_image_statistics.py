"""Statistics of pictures whose values are known."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from ebbflow.evaluation.image_statistics import (
    STATISTICS,
    compute_chance_effect,
    compute_effect_size,
    compute_image_statistics,
    make_thumbnails,
    measure_diversity_across,
    measure_diversity_within,
)


def page(level: int = 255, size: tuple[int, int] = (64, 96)) -> np.ndarray:
    return np.full((*size, 3), level, np.uint8)


def stripes(width: int) -> np.ndarray:
    """Black and white columns of a width in pixels."""
    return np.repeat(
        np.where(np.arange(96) // width % 2, 255, 0).astype(np.uint8)[None, :, None], 3, axis=2
    ).repeat(64, axis=0)


def grain(size: tuple[int, int] = (64, 96)) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)


def of(image: np.ndarray) -> dict[str, float]:
    return {name: values[0] for name, values in compute_image_statistics(image[None]).items()}


@pytest.mark.parametrize("level", [0, 128, 255])
def test_a_flat_page_has_nothing_but_brightness(level: int) -> None:
    assert of(page(level)) == pytest.approx(
        dict.fromkeys(STATISTICS, 0.0) | {"brightness": level / 255}
    )


def test_two_levels_are_one_bit_and_all_levels_are_eight() -> None:
    assert of(stripes(8))["entropy"] == pytest.approx(1 / 8)
    ramp = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
    assert of(ramp)["entropy"] == pytest.approx(1)


def test_edges_are_the_pixels_on_both_sides_of_a_step() -> None:
    assert of(stripes(48))["edge_density"] == pytest.approx(2 / 96)
    assert of(stripes(8))["edge_density"] == pytest.approx(22 / 96)


def test_saturation_is_that_of_the_colour() -> None:
    red = page()
    red[..., 1:] = 0
    assert of(red)["saturation"] == pytest.approx(1)
    half = page()
    half[..., 1:] = 128
    assert of(half)["saturation"] == pytest.approx(127 / 255, abs=0.005)


def test_blur_lowers_sharpness_and_edges_and_grain_raises_them() -> None:
    sharp = of(stripes(8))
    blurred = of(cv2.GaussianBlur(stripes(8), (0, 0), 4))
    assert blurred["sharpness"] < 0.2 * sharp["sharpness"]
    assert blurred["edge_density"] < sharp["edge_density"]
    assert of(grain())["sharpness"] > 1.5 * sharp["sharpness"]


def test_text_that_is_written_over_a_picture_is_seen() -> None:
    photo = cv2.GaussianBlur(grain((128, 192)), (0, 0), 12)
    written = photo.copy()
    cv2.putText(
        written, "give this a ten", (8, 70), cv2.FONT_HERSHEY_SIMPLEX, 0.6, (255, 255, 255), 2
    )
    assert of(photo)["text_likeness"] == 0
    assert of(written)["text_likeness"] > 0.05


def test_a_video_has_the_means_of_its_frames() -> None:
    video = np.stack([page(0), page(100), page(255)])[None]
    assert compute_image_statistics(video)["brightness"][0] == pytest.approx(355 / 3 / 255)
    assert make_thumbnails(video).shape == (1, 3 * make_thumbnails(page()[None]).shape[1])


def test_thumbnails_are_at_most_32_pixels_wide_and_never_enlarged() -> None:
    assert make_thumbnails(page(51, (64, 128))[None]) == pytest.approx(
        np.full((1, 16 * 32 * 3), 0.2)
    )
    assert make_thumbnails(page(size=(16, 32))[None]).shape == (1, 16 * 32 * 3)


def test_diversity_is_the_mean_distance_within_a_prompt() -> None:
    points = np.array([[0.0, 0.0], [0.0, 0.0], [2.0, 2.0], [5.0, 5.0], [9.0, 9.0]])
    values = measure_diversity_within([1, 1, 1, 2, 3], points)
    assert values[:3] == pytest.approx([1.0, 1.0, 2.0])
    assert np.isnan(values[3:]).all()


def test_a_duplicate_has_no_distance_to_the_nearest_other_one() -> None:
    points = np.array([[0.0, 0.0], [3.0, 3.0], [0.0, 0.0], [4.0, 4.0]])
    assert measure_diversity_across(points) == pytest.approx([0.0, 1.0, 0.0, 1.0])
    assert np.isnan(measure_diversity_across(points[:1])).all()


def test_an_effect_size_counts_standard_deviations_and_is_rarely_more_than_chance() -> None:
    assert compute_effect_size(np.array([1.0, 3.0]), 1.0, 0.5) == 2
    assert compute_effect_size(np.array([1.0]), 0.0, 0.0) == 0
    generator = np.random.default_rng(0)
    beyond = []
    for _ in range(400):
        one = generator.normal(size=64)
        other = generator.normal(size=32)
        beyond.append(
            abs(compute_effect_size(other, one.mean(), one.std())) > compute_chance_effect(32, 64)
        )
    assert 0.02 < np.mean(beyond) < 0.08
