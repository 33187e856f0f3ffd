"""Aspect-ratio buckets: which sizes there are, which a picture gets, and what of it is shown."""

import numpy as np
import pytest

from ebbflow.data.buckets import choose_bucket, fit_picture, is_smaller, list_bucket_sizes
from ebbflow.recipe.data import BucketsConfig


def test_without_buckets_there_is_the_size_of_the_model_alone():
    assert list_bucket_sizes((48, 80), None) == [(48, 80)]


def test_bucket_sizes_of_a_hand_computed_case():
    config = BucketsConfig(step=128, max_aspect_ratio=2)
    assert list_bucket_sizes((512, 512), config) == [(640, 384), (512, 512), (384, 640)]


@pytest.mark.parametrize("size", [(512, 512), (768, 512), (1024, 1024), (480, 832)])
@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0, 4.0])
def test_every_bucket_is_within_step_area_and_ratio(size, ratio):
    config = BucketsConfig(step=64, max_aspect_ratio=ratio)
    buckets = list_bucket_sizes(size, config)
    assert size in buckets
    for height, width in set(buckets) - {size}:
        assert height % 64 == width % 64 == 0
        assert height * width <= size[0] * size[1]
        assert max(height / width, width / height) <= ratio
        assert (width, height) in buckets


def test_a_picture_goes_to_the_nearest_ratio_as_a_factor():
    sizes = [(640, 384), (512, 512), (384, 640)]
    assert choose_bucket(1000, 1000, sizes) == (512, 512)
    assert choose_bucket(3000, 1000, sizes) == (640, 384)
    # Between 1 and 5/3 the border is sqrt(5/3) = 1.291, not the mean 1.333.
    assert choose_bucket(1000, 1280, sizes) == (512, 512)
    assert choose_bucket(1000, 1310, sizes) == (384, 640)


def test_a_picture_that_must_be_enlarged_is_smaller():
    assert not is_smaller(64, 64, (64, 64))
    assert is_smaller(63, 100, (64, 64))
    assert is_smaller(100, 63, (64, 64))


def test_a_picture_of_the_size_is_left_as_it_is():
    picture = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    assert np.array_equal(fit_picture(picture, (8, 12)), picture)


def test_what_stands_out_is_cropped_on_both_sides():
    # Four columns of equal width; a square of half the width shows the two in the middle.
    colours = np.array([10, 90, 170, 250], np.uint8)
    picture = np.repeat(np.repeat(colours, 16)[None, :, None], 32, axis=0).repeat(3, axis=2)
    fitted = fit_picture(picture, (16, 16))
    assert fitted.shape == (16, 16, 3)
    assert (fitted[:, 2:6] == 90).all()
    assert (fitted[:, 10:14] == 170).all()


def test_a_video_is_fitted_frame_by_frame():
    clip = np.random.default_rng(0).integers(0, 256, (3, 40, 20, 3), np.uint8)
    fitted = fit_picture(clip, (16, 16))
    assert fitted.shape == (3, 16, 16, 3)
    assert np.array_equal(fitted[1], fit_picture(clip[1], (16, 16)))
