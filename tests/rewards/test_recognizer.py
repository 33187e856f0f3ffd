"""The recogniser of glyph pictures: that it reads, that its gradient is the score's, and how its
weights are kept.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from reward_cases import as_prompt, as_rgb

from ebbflow.models.glyph_training import recognizer as training
from ebbflow.models.glyph_training.lettering import render_text
from ebbflow.recipe import Recipe
from ebbflow.recipe.base import RecipeError
from ebbflow.rewards.built_in.recognizer import Recognizer
from ebbflow.storage.artifacts import ArtifactError

SIZE = (16, 16, 2)
"""Height, width and letters: half of what the glyph model draws, and so half of the training."""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of this file's own, with a recogniser of two letters that was trained for a quarter
    of the steps of a real one.
    """
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        training.open_recognizer.cache_clear()
        training.train_recognizer(
            *SIZE, training.cache_folder() / training._cache_key(*SIZE), steps=100
        )
        yield folder
    training.open_recognizer.cache_clear()


def pictures(texts, height=16, width=16):
    return as_rgb(np.stack([render_text(text, height, width) for text in texts]))


def scores(images, targets):
    return Recognizer()(images, [as_prompt(index, target) for index, target in enumerate(targets)])


def test_it_reads_rendered_letters_and_grain_costs():
    letters = np.random.default_rng(3).integers(26, size=(60, 2))
    texts = ["".join(training.ALPHABET[index] for index in row) for row in letters]
    images = pictures(texts)
    own = scores(images, texts)
    others = scores(images, texts[1:] + texts[:1])
    assert own.metrics["recognizer_exact"].mean() > 0.8
    assert own.values.mean() > others.values.mean() + 1.5
    assert own.values.max() < 0
    grain = np.random.default_rng(0).normal(0, 80, images.shape)
    assert (
        scores(np.clip(images + grain, 0, 255).astype(np.uint8), texts).values.mean()
        < own.values.mean() - 0.1
    )
    assert others.metrics["recognizer_exact"].mean() < 0.1


def test_case_and_spaces_are_ignored_and_what_it_cannot_read_is_a_failure():
    found = scores(pictures(["AB"] * 7), ["AB", "a b", "A1", None, "", "A" * 40, "AB"])
    assert found.values[0] == pytest.approx(found.values[1])
    assert np.isnan(found.values).tolist() == [False, False, True, True, True, True, False]
    assert "'A1'" in found.failures[2]
    assert "names no text" in found.failures[3]
    assert "take ocr" in found.failures[4]
    assert "16x16" in found.failures[5]
    assert (
        "up to 64x256 pixels, and this picture is 64x512"
        in scores(np.zeros((1, 64, 512, 3), np.uint8), ["AB"]).failures[0]
    )


def test_the_gradient_is_that_of_finite_differences():
    reward = Recognizer()
    prompts = [as_prompt(index, text) for index, text in enumerate(["AB", "QX"])]
    assert reward.has_gradient
    network = training.open_recognizer(*SIZE).double()
    try:
        images = (
            torch.from_numpy(pictures(["AC", "QX"])).permute(0, 3, 1, 2).double() / 255 * 0.8 + 0.1
        )
        images.requires_grad_()
        torch.autograd.gradcheck(
            lambda x: reward.score_with_gradient(x, prompts), images, fast_mode=True
        )
        assert reward.score_with_gradient(images, prompts).shape == (2,)
        (gradient,) = torch.autograd.grad(reward.score_with_gradient(images, prompts)[0], images)
        assert gradient[0].abs().max() > 1e-3
        assert (gradient[1] == 0).all()
    finally:
        network.float()


def test_the_gradient_is_of_the_score_and_targets_of_different_lengths_keep_their_places(cache):
    narrow = (16, 16, 1)
    training.train_recognizer(
        *narrow, training.cache_folder() / training._cache_key(*narrow), steps=1
    )
    images = pictures(["AB", "CC", "QX"])
    targets = ["AB", "C", "QX"]
    found = Recognizer().score_with_gradient(
        torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255,
        [as_prompt(i, text) for i, text in enumerate(targets)],
    )
    np.testing.assert_allclose(found.numpy(), scores(images, targets).values, rtol=1e-5)
    alone = [scores(images[row : row + 1], targets[row : row + 1]).values[0] for row in range(3)]
    np.testing.assert_allclose(found.numpy(), alone, rtol=1e-5)


def test_training_repeats_its_weights_and_leaves_random_numbers_and_threads_alone(tmp_path):
    threads = torch.get_num_threads()
    state = torch.random.get_rng_state()
    for name in ("first", "second"):
        torch.rand(1)
        training.train_recognizer(*SIZE, tmp_path / name, steps=2)
    torch.rand(1)
    files = [(tmp_path / name / training.WEIGHTS).read_bytes() for name in ("first", "second")]
    assert files[0] == files[1]
    assert torch.get_num_threads() == threads
    after = torch.random.get_rng_state()
    torch.random.set_rng_state(state)
    torch.rand(3)
    assert torch.equal(torch.random.get_rng_state(), after)


def test_a_recogniser_is_trained_once_and_a_damaged_one_is_an_error(cache, monkeypatch, caplog):
    monkeypatch.setattr(training, "STEPS", 1)
    monkeypatch.setattr(training.train_recognizer, "__defaults__", (1,))
    shape = (16, 24, 3)
    with caplog.at_level(logging.INFO, logger=training.__name__):
        for _ in range(2):
            training.open_recognizer.cache_clear()
            training.open_recognizer(*shape)
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "trained a recogniser of 3 letters in 16x24 pixels"
    ]
    weights = training.cache_folder() / training._cache_key(*shape) / training.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1])
    training.open_recognizer.cache_clear()
    with pytest.raises(ArtifactError):
        training.open_recognizer(*shape)


@pytest.mark.parametrize("shape", [(16, 16, 1), (24, 80, 7), (64, 256, 16)])
def test_networks_fit_every_size_of_the_glyph_model(shape):
    height, width, letters = shape
    found = training.build_recognizer(*shape)(torch.rand(2, 1, height, width))
    assert found.shape == (2, letters, 26)
    torch.testing.assert_close(found.exp().sum(2), torch.ones(2, letters))


@pytest.mark.exhaustive
def test_the_real_one_reads_four_letters(clean):
    images, prompts = clean
    found = Recognizer()(images, prompts)
    assert found.metrics["recognizer_exact"].mean() > 0.85
    assert found.values.mean() > -0.4


def test_a_model_that_draws_small_letters_is_not_scored():
    """Its targets are folded to capitals, so a picture of what was asked would score worse than one
    of capitals.
    """
    drawn = {"model": {"training": {"alphabets": ["capitals", "lower_case"]}}}
    with pytest.raises(
        RecipeError,
        match=(
            "recognizer reads capitals alone, and model.training.alphabets has lower_case; take ocr"
        ),
    ):
        Recipe.model_validate(drawn | {"rewards": ["recognizer"]})
