"""Images of a policy for people: in batches, with noise that is a prompt's own, and an error for
one that cannot be drawn.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from ebbflow.data.prompts import Prompt
from ebbflow.evaluation import serve
from ebbflow.evaluation.serve import GeneratedImage, generate_images
from ebbflow.flow.noise import generate_initial_noise
from ebbflow.models.families.glyph import GlyphModel
from ebbflow.recipe.evaluation import EvaluationConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training.policy_metadata import write_base_policy


@pytest.fixture(scope="module")
def policy(base_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "policy"
    write_base_policy(
        folder,
        verify_folder(base_folder),
        "recipe",
        PolicyConfig(),
        evaluation=EvaluationConfig(steps=3),
    )
    return folder


@pytest.fixture
def drawn(base_folder, policy):
    """``drawn(["EBBS", "FLOW"], [0, 1])``"""

    def draw(texts, seeds=None, **rest) -> list[GeneratedImage]:
        prompts = [text if isinstance(text, Prompt) else prompt(text) for text in texts]
        return generate_images(base_folder, policy, prompts, seeds or [0] * len(texts), **rest)

    return draw


def prompt(text, negative=""):
    return Prompt(0, text, negative, None, "", "", "{}")


def pixels(drawn: GeneratedImage) -> np.ndarray:
    assert drawn.image
    return np.asarray(Image.open(io.BytesIO(drawn.image))).astype(int)


@pytest.fixture
def passes(monkeypatch):
    """The rows of every pass that is made."""
    made = []
    generate = serve.generate_samples

    def counted(model, conditioning, keys, *rest, **named):
        made.append(len(keys))
        return generate(model, conditioning, keys, *rest, **named)

    monkeypatch.setattr(serve, "generate_samples", counted)
    return made


TEXTS = [f"{first}BC{last}" for first in "ABCDEFG" for last in "RSTUVWXYZ"]
SEEDS = [3 * index % 7 for index in range(len(TEXTS))]


def test_a_batch_is_one_pass_and_a_picture_is_the_one_that_is_drawn_alone(drawn, passes):
    together = drawn(TEXTS, SEEDS)
    assert passes == [63]
    alone = [drawn([text], [seed])[0] for text, seed in zip(TEXTS[:9], SEEDS[:9], strict=True)]
    assert passes == [63] + [1] * 9
    for one, other in zip(together[:9], alone, strict=True):
        assert (
            abs(pixels(one) - pixels(other)).max() <= 1
        )  # float32 sums of another batch size, rounded to 8 bits
    assert len({picture.image for picture in together}) == 63


def test_the_noise_of_a_picture_is_the_same_in_every_batch(drawn, monkeypatch):
    seen = {}
    generate = serve.generate_samples

    def noted(model, conditioning, keys, *rest, **named):
        for row, noise in enumerate(generate_initial_noise(model.latent_shape, keys)):
            seen.setdefault(keys.samples[row], []).append(noise)
        return generate(model, conditioning, keys, *rest, **named)

    monkeypatch.setattr(serve, "generate_samples", noted)
    drawn(["ABCD", "EFGH", "IJKL"], [5, 2**62, 5])
    drawn(["MNOP", "ABCD"], [2**62, 5])
    assert {seed: len(noises) for seed, noises in seen.items()} == {5: 3, 2**62: 2}
    for noises in seen.values():
        assert all(torch.equal(noise, noises[0]) for noise in noises)


def test_the_seed_is_drawn_and_zero_is_the_default_of_a_sample(drawn):
    first, again, other = drawn(["EBBS"] * 3, [4, 4, 5])
    assert np.array_equal(pixels(first), pixels(again))
    assert (pixels(first) != pixels(other)).any()


def test_large_pictures_are_drawn_in_smaller_batches(drawn, passes, monkeypatch):
    monkeypatch.setattr(serve, "MAX_LATENTS", 2 * 16 * 32)
    drawn(TEXTS[:5])
    monkeypatch.setattr(serve, "MAX_LATENTS", 1)
    drawn(TEXTS[:2])
    assert passes == [2, 2, 1, 1, 1]


def test_a_prompt_that_cannot_be_drawn_leaves_the_others_alone(drawn):
    texts = ["EBBS", "TOOLONG", "FLOW", "ANOTHER", "TIDE"]
    found = drawn(texts)
    assert [picture.image is None for picture in found] == [False, True, False, True, False]
    assert found[1].error == "this glyph model draws 4 letters at most and was asked for 'TOOLONG'"
    assert "'ANOTHER'" in (found[3].error or "")
    for index, (one,) in ((index, drawn([texts[index]])) for index in (0, 2, 4)):
        assert abs(pixels(found[index]) - pixels(one)).max() <= 1
    assert all(
        not picture.error and not picture.warning for picture in (found[0], found[2], found[4])
    )


def test_what_is_wrong_with_the_model_is_no_error_of_a_prompt(drawn, monkeypatch):
    def broken(self, texts):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(GlyphModel, "encode_texts", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        drawn(["EBBS", "FLOW"])


def test_a_picture_that_is_not_finite_is_an_error(drawn, monkeypatch):
    velocity = GlyphModel.predict_velocity

    def overflowing(self, latents, sigma, conditioning):
        found = velocity(self, latents, sigma, conditioning)
        found[1] = torch.inf
        return found

    monkeypatch.setattr(GlyphModel, "predict_velocity", overflowing)
    fine, broken = drawn(["EBBS", "FLOW"])
    assert fine.image
    assert (broken.image, broken.error) == (None, serve.NOT_FINITE)


@pytest.mark.parametrize(
    ("text", "instead"),
    [("ebbs", "EBBS"), ('"A1B2"', "AB"), ("EBB", "EBB"), ("A-BCD", "ABCD"), ("12", "")],
)
def test_what_glyph_was_not_trained_on_is_said(drawn, text, instead):
    (picture,) = drawn([text])
    assert picture.image
    assert (
        picture.warning
        == f"it was trained on 4 capital letters A-Z and reads {instead!r} in {text!r}"
    )


@pytest.mark.parametrize("text", ["EBBS", '"EBBS"', ' "EB BS" '])
def test_of_what_it_was_trained_on_nothing_is_said(drawn, text):
    assert drawn([text])[0].warning is None


def test_what_is_drawn_instead_is_the_same_picture(drawn):
    pictures = drawn(["ebbs", '"EBBS"', "E1B2B3S4"])
    assert all(np.array_equal(pixels(picture), pixels(pictures[0])) for picture in pictures)


def test_a_negative_prompt_without_guidance_is_said(drawn):
    (picture,) = drawn([prompt("EBBS", "blurry")])
    assert picture.warning == "negative_prompt is ignored, as the policy draws without guidance"


def test_a_family_that_says_nothing_is_asked_nothing(drawn, monkeypatch):
    monkeypatch.delattr(GlyphModel, "describe_unseen_letters")
    (picture,) = drawn(["ebbs"])
    assert picture.image
    assert picture.warning is None


def test_no_prompts_no_pictures(drawn):
    assert drawn([]) == []
