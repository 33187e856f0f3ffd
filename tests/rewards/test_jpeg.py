import numpy as np
import pytest
from PIL import Image
from reward_cases import as_prompt

from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards.built_in.jpeg import (
    JpegCompressibility,
    JpegIncompressibility,
    measure_kilobytes,
)
from ebbflow.rewards.combine import load_scorer


@pytest.fixture
def images() -> np.ndarray:
    """A flat image, a smooth ramp, and colour noise, 64x96."""
    ramp = np.broadcast_to(np.linspace(0, 255, 96)[:, None], (64, 96, 3))
    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3))
    return np.stack([np.full((64, 96, 3), 128), ramp, noise]).astype(np.uint8)


def prompts(count):
    return [as_prompt(index, None) for index in range(count)]


def test_jpeg_reward_rises_with_detail(images):
    flat, ramp, noise = JpegIncompressibility()(images, prompts(3)).values
    assert 0 < flat < ramp < noise
    assert noise > 5 * ramp


def test_the_size_is_that_of_pillows_file_at_quality_95(images, tmp_path):
    for index, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{index}.jpg", quality=95)
    sizes = [(tmp_path / f"{index}.jpg").stat().st_size for index in range(3)]
    assert measure_kilobytes(images) == pytest.approx(np.array(sizes) / 1000, abs=0)
    assert JpegIncompressibility()(images, prompts(3)).values == pytest.approx(
        np.array(sizes) / 1000 / 500
    )


def test_one_is_the_other_turned_round(images):
    up, down = (
        reward()(images, prompts(3)).values
        for reward in (JpegIncompressibility, JpegCompressibility)
    )
    assert np.array_equal(up, -down)
    assert up.min() > 0


def test_neither_the_batch_nor_the_prompt_matters(images):
    together = JpegCompressibility()(images, prompts(3)).values
    alone = [
        JpegCompressibility()(images[i : i + 1], [as_prompt(9, "TEXT")]).values[0] for i in range(3)
    ]
    assert together.tolist() == alone == JpegCompressibility()(images, prompts(3)).values.tolist()
    assert JpegCompressibility()(images[::-1], prompts(3)).values.tolist() == alone[::-1]


def test_a_view_counts_like_its_copy(images):
    mirrored = images[:, :, ::-1]
    assert measure_kilobytes(mirrored).tolist() == measure_kilobytes(mirrored.copy()).tolist()


def test_no_images_have_no_sizes(images):
    assert JpegCompressibility()(images[:0], []).values.shape == (0,)


def test_a_recipe_can_name_both(images):
    table = load_scorer(
        [configure_reward("jpeg_compressibility", weight=2.0)],
        [configure_reward("jpeg_incompressibility")],
    )(images, prompts(3))
    assert np.array_equal(table.reward, -2 * table.metrics["jpeg_incompressibility"])
    assert table.failures == [None] * 3
