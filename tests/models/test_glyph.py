"""The glyph family: the folder that diffusers reads, the tokenizer, the pixels, and training that
repeats itself.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.data.prompts import Prompt
from ebbflow.models import ModelError, load_model
from ebbflow.models.families.glyph import (
    ALPHABET,
    GlyphModel,
    build_glyph_model,
    build_letter_tokenizer,
    encode_grey_images,
)
from ebbflow.models.glyph_training import trained
from ebbflow.models.glyph_training.train import _sample_training_batch, train_glyph_base
from ebbflow.models.prepare import copy_base_folder, train_base_folder
from ebbflow.recipe.model import GlyphTrainingConfig, ModelConfig
from ebbflow.rewards.built_in.ocr import Ocr
from ebbflow.storage.artifacts import COMMIT, MANIFEST, verify_folder

GLYPH = ModelConfig()

SHORT = GlyphTrainingConfig(steps=5, batch=4)
TOKENIZER = "a14d6b265bdc8ab3"


def velocity(model):
    latents = torch.randn(2, *model.latent_shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.predict_velocity(
            latents, torch.tensor([0.9, 0.3]), model.encode_texts(["ABCD", "ZZ"])
        )


def test_diffusers_loads_the_folder(base_folder, open_pipeline, model):
    pipeline = open_pipeline(base_folder)
    assert isinstance(pipeline, StableDiffusion3Pipeline)
    for part in ("transformer", "text_encoder"):
        ours, theirs = (getattr(of, part).state_dict() for of in (model, pipeline))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert pipeline.tokenizer("ABCD").input_ids == model.tokenizer("ABCD").input_ids
    assert pipeline.scheduler.config.shift == model.scheduler.config.shift
    assert pipeline.vae is None


def test_save_and_load_are_exact(model, tmp_path):
    model.save(tmp_path)
    again = load_model(tmp_path)
    assert torch.equal(velocity(again), velocity(model))
    assert again.latent_shape == model.latent_shape == (1, 16, 32)


def test_a_loaded_model_is_frozen(model):
    assert not any(
        p.requires_grad
        for part in (model.transformer, model.text_encoder)
        for p in part.parameters()
    )
    assert not model.transformer.training
    assert not model.text_encoder.training


def test_velocity_depends_on_everything_it_is_given(model):
    latents = torch.zeros(1, *model.latent_shape)

    def at(x, sigma, text):
        with torch.no_grad():
            return model.predict_velocity(x, torch.tensor([sigma]), model.encode_texts([text]))

    here = at(latents, 0.5, "ABCD")
    for other in (
        at(latents + 1, 0.5, "ABCD"),
        at(latents, 0.5004, "ABCD"),
        at(latents, 0.5, "ABCE"),
        at(latents, 0.5, "BACD"),
    ):
        assert (other - here).abs().max() > 1e-5


def test_glyph_sigmas_are_evenly_spaced(model):
    for steps in (2, 6, 10):
        sigmas = model.compute_sigmas(steps)
        assert sigmas.tolist() == pytest.approx(
            [1 - i / steps for i in range(steps)] + [0], abs=1e-6
        )
        assert sigmas.dtype == torch.float32
    sigmas_of_four = model.compute_sigmas(4)
    model.compute_sigmas(7)
    assert len(sigmas_of_four) == 5


def test_encoding_is_by_row(model):
    together = model.encode_texts(["ABCD", "Q", "WXYZ"])
    assert together["embeds"].shape == (3, 6, 64)
    assert together["pooled"].shape == (3, 64)
    for row, text in enumerate(["ABCD", "Q", "WXYZ"]):
        alone = model.encode_texts([text])
        assert torch.allclose(alone["embeds"][0], together["embeds"][row], atol=1e-6)
        assert torch.allclose(alone["pooled"][0], together["pooled"][row], atol=1e-6)
    some = together.select_rows(torch.tensor([2, 2, 0]))
    assert torch.equal(some["pooled"], together["pooled"][[2, 2, 0]])


@given(st.text(alphabet=st.characters(max_codepoint=0x2FFF), max_size=12))
def test_the_tokenizer_knows_letters_and_nothing_else(text):
    letters = [letter.upper() for letter in text if letter.upper() in ALPHABET and letter.isascii()]
    tokenizer = build_letter_tokenizer(16)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)
    assert tokens == ["<start>", *letters, "<end>"]


@given(st.text(alphabet=st.characters(max_codepoint=0x2FFF), max_size=12))
def test_the_tokenizer_knows_the_alphabets_that_it_was_given(text):
    """Without small letters of their own, they are capitals."""
    for alphabet, known in (
        ("capitals and small", ALPHABET + ALPHABET.lower()),
        ("with digits", ALPHABET + "0123456789"),
    ):
        tokenizer = build_letter_tokenizer(16, known)
        read = (
            text
            if alphabet == "capitals and small"
            else "".join(x.upper() if x.isascii() else x for x in text)
        )
        tokens = tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)
        assert tokens == ["<start>", *(letter for letter in read if letter in known), "<end>"]


def test_the_tokenizer_of_capitals_is_what_it_was():
    """It is in the digest of every base model."""
    assert (
        hashlib.sha256(build_letter_tokenizer(4).backend_tokenizer.to_str().encode()).hexdigest()[
            :16
        ]
        == TOKENIZER
    )


def test_quotes_and_case_do_not_matter_and_letters_do(model):
    plain = model.encode_texts(["ABCD"])["pooled"]
    for same in ('"ABCD"', "“abcd”", " a-b c.d\n", '"AbCd"!'):
        assert torch.equal(model.encode_texts([same])["pooled"], plain)
    for other in ("ABDC", "ABC", "ABCDA"[1:], ""):
        assert not torch.allclose(model.encode_texts([other])["pooled"], plain, atol=1e-4)


def test_decode_is_the_inverse_of_to_latents(model):
    grey = np.random.default_rng(0).integers(0, 256, (3, 16, 32), dtype=np.uint8)
    grey[0].flat[:256] = np.arange(256)
    images = model.decode_latents(encode_grey_images(grey))
    assert (images.dtype, images.shape) == (np.uint8, (3, 16, 32, 3))
    for channel in range(3):
        assert np.array_equal(images[..., channel], grey)


def test_encoding_images_is_the_inverse_of_decoding(model):
    latents = torch.randn(5, *model.latent_shape, generator=torch.Generator().manual_seed(2))
    images = model.decode_latents(latents)
    encoded = model.encode_images(images)
    assert (encoded.dtype, encoded.shape) == (torch.float32, latents.shape)
    assert np.array_equal(model.decode_latents(encoded), images)
    inside = (latents * 0.75 + 0.55).abs() < 1
    assert inside.float().mean() > 0.5
    # Half a grey level of 255, in latents.
    assert (encoded - latents)[inside].abs().max() <= 0.5 / 127.5 / 0.75 + 1e-6


@pytest.mark.parametrize("shape", [(1, 16, 40, 3), (1, 32, 16, 3), (1, 16, 32, 4)])
def test_images_of_another_size_are_refused_with_both_sizes(model, shape):
    with pytest.raises(ModelError, match=rf"{shape[1]}, {shape[2]}, {shape[3]}.*16, 32, 3"):
        model.encode_images(np.zeros(shape, np.uint8))


def test_decode_stays_inside_the_pixels(model):
    wild = torch.tensor([-100.0, 100.0]).view(2, 1, 1, 1).expand(2, *model.latent_shape)
    images = model.decode_latents(wild)
    assert (images[0] == 0).all()
    assert (images[1] == 255).all()


def test_a_bad_folder_is_named_with_what_it_lacks(base_folder, tmp_path):
    with pytest.raises(ModelError, match="missing': there is no base-model folder"):
        load_model(tmp_path / "missing")
    with pytest.raises(
        ModelError,
        match=(
            "transformer, scheduler, text_encoder, tokenizer, glyph.json, model_index.json missing"
        ),
    ):
        load_model(tmp_path)
    for part in (
        "transformer",
        "scheduler",
        "text_encoder",
        "tokenizer",
        "glyph.json",
        "model_index.json",
    ):
        folder = tmp_path / f"without-{part}"
        shutil.copytree(base_folder, folder, ignore=shutil.ignore_patterns(part, MANIFEST, COMMIT))
        with pytest.raises(ModelError, match=f"{part} missing"):
            load_model(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("glyph.json", '{"height": 16}'),
        ("transformer/diffusion_pytorch_model.safetensors", "nonsense"),
        ("tokenizer/tokenizer.json", "{}"),
    ],
)
def test_a_folder_with_a_broken_file_is_a_bad_folder(base_folder, tmp_path, file, content):
    shutil.copytree(
        base_folder, tmp_path / "broken", ignore=shutil.ignore_patterns(MANIFEST, COMMIT)
    )
    (tmp_path / "broken" / file).write_text(content)
    with pytest.raises(ModelError, match="broken"):
        load_model(tmp_path / "broken")


def test_training_twice_gives_the_same_bytes(tmp_path):
    train_glyph_base(SHORT, tmp_path / "first")
    torch.manual_seed(123)
    state = torch.get_rng_state()
    train_base_folder(SHORT, 1, tmp_path / "second")
    assert torch.equal(torch.get_rng_state(), state)
    assert verify_folder(tmp_path / "first") == verify_folder(tmp_path / "second")
    train_glyph_base(SHORT.model_copy(update={"seed": 1}), tmp_path / "third")
    assert verify_folder(tmp_path / "third") != verify_folder(tmp_path / "first")


def test_the_model_of_the_package_was_trained_with_the_default_settings(tmp_path):
    config = GlyphTrainingConfig()
    packaged = trained.load_trained_glyph(config)
    assert packaged is not None, f"train it again: python -m {trained.__name__}"
    state = torch.get_rng_state()
    train_base_folder(config, 1, tmp_path / "base")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(velocity(load_model(tmp_path / "base")), velocity(packaged))
    train_base_folder(config, 2, tmp_path / "again")
    assert verify_folder(tmp_path / "base") == verify_folder(tmp_path / "again")


def test_the_model_of_the_package_spells_but_leaves_something_to_learn(make_prompts):
    packaged = trained.load_trained_glyph(GlyphTrainingConfig())
    prompts = make_prompts(48)
    latents = torch.randn(48, *packaged.latent_shape, generator=torch.Generator().manual_seed(1))
    conditioning = packaged.encode_texts([prompt.target for prompt in prompts])
    sigmas = torch.linspace(1, 0, 11)
    with torch.no_grad():
        for sigma, next_sigma in itertools.pairwise(sigmas):
            velocities = packaged.predict_velocity(latents, sigma.expand(48), conditioning)
            latents = latents + (next_sigma - sigma) * velocities
        images = packaged.decode_latents(latents)
    assert 0.35 < Ocr()(images, prompts).values.mean() < 0.75


def test_the_model_of_the_package_is_not_taken_for_one_with_other_settings():
    assert trained.load_trained_glyph(GlyphTrainingConfig(seed=1)) is None
    assert trained.load_trained_glyph(GlyphTrainingConfig(width=64)) is None


def test_a_file_of_other_layers_says_how_it_is_made_again(model, tmp_path, monkeypatch):
    config = GlyphTrainingConfig()
    monkeypatch.setattr(trained, "TRAINED_MODEL", tmp_path / "base.safetensors")
    del model.text_encoder.text_projection
    trained.save_trained_glyph(model, config, trained.TRAINED_MODEL)
    with pytest.raises(ValueError, match=r"python -m ebbflow\.models\.glyph_training\.trained"):
        trained.load_trained_glyph(config)


def test_capitals_alone_are_drawn_as_always():
    """The draws of other alphabets take none of theirs: the base model of the default recipe keeps
    its bytes.
    """
    plain = np.random.default_rng(3)
    letters = plain.integers(26, size=(SHORT.batch, SHORT.letters))
    drawn = np.random.default_rng(3)
    _, captions = _sample_training_batch(SHORT, drawn, False)
    assert captions == ["".join(ALPHABET[index] for index in row) for row in letters]
    # What the renderer draws.
    plain.uniform(0.95, 1.05, SHORT.batch)
    plain.uniform(-1, 1, (SHORT.batch, 2))
    assert drawn.random() == plain.random()


def test_each_string_is_of_one_alphabet_and_so_is_its_noise():
    config = GlyphTrainingConfig(
        alphabets=["capitals", "digits", "lower_case"], batch=60, caption_noise=1.0
    )
    seen = set()
    for noisy in (False, True):
        _, captions = _sample_training_batch(config, np.random.default_rng(0), noisy)
        kinds = [
            [known for known in config.alphabet_characters if set(text) <= set(known)]
            for text in captions
        ]
        assert {len(kind) for kind in kinds} == {1}
        seen |= {kind for (kind,) in kinds}
    assert seen == set(config.alphabet_characters)


def test_a_model_of_several_alphabets_says_what_it_draws(tmp_path):
    build_glyph_model(GlyphTrainingConfig(alphabets=["capitals", "digits", "lower_case"])).save(
        tmp_path
    )
    model = load_model(tmp_path)
    assert isinstance(model, GlyphModel)

    def said(text):
        return model.describe_unseen_letters(Prompt(0, text, "", None, "", "", "{}"))

    assert [said(text) for text in ('"ABCD"', '"0123"', "abcd")] == [None] * 3
    assert (
        said("AB12")
        == "it was trained on 4 capital letters A-Z or digits 0-9 or small letters a-z and reads"
        " 'AB12' in 'AB12'"
    )
    different = [model.encode_texts([text])["pooled"] for text in ("OPEN", "open")]
    assert not torch.allclose(*different, atol=1e-4)


def test_base_training_lowers_the_loss(tmp_path):
    """Twenty steps: the loss of the trained model is below that of the start, on strings of its
    own.
    """
    from ebbflow.models.glyph_training.train import _flow_matching_loss

    def loss(folder):
        model = load_model(folder)
        clean, captions = _sample_training_batch(config, np.random.default_rng(9), False)
        torch.manual_seed(0)
        with torch.no_grad():
            return _flow_matching_loss(model, clean, captions).item()

    config = GlyphTrainingConfig(steps=20, batch=16, ema=0.0)
    train_glyph_base(config.model_copy(update={"steps": 1, "lr": 1e-9}), tmp_path / "start")
    train_glyph_base(config, tmp_path / "end")
    assert loss(tmp_path / "end") < 0.9 * loss(tmp_path / "start")


def test_the_average_of_the_weights_is_saved(tmp_path):
    # The average starts at the weights after the first step, so after two it is ema * first + (1 -
    # ema) * second.
    def trained(steps, ema):
        folder = tmp_path / f"{steps}-{ema}"
        train_glyph_base(
            GlyphTrainingConfig(steps=steps, batch=2, ema=ema, caption_noise=0.0), folder
        )
        return load_model(folder).transformer.state_dict()

    first = trained(1, 0.0)
    second = trained(2, 0.0)
    average = trained(2, 0.25)
    assert any(not torch.allclose(first[name], second[name]) for name in first)
    for name, value in average.items():
        assert torch.allclose(value, 0.25 * first[name] + 0.75 * second[name], atol=1e-6)


def test_a_copied_base_is_the_same_artifact(base_folder, tmp_path):
    copy_base_folder(base_folder, tmp_path / "copy", GLYPH)
    assert verify_folder(tmp_path / "copy") == verify_folder(base_folder)
    plain = tmp_path / "plain"
    shutil.copytree(base_folder, plain, ignore=shutil.ignore_patterns(MANIFEST, "COMMIT"))
    copy_base_folder(plain, tmp_path / "committed", GLYPH)
    assert verify_folder(tmp_path / "committed") == verify_folder(base_folder)
    with pytest.raises(ModelError):
        copy_base_folder(tmp_path / "nothing", tmp_path / "never", GLYPH)
    assert not (tmp_path / "never").exists()


def test_sizes_follow_the_recipe(tmp_path):
    train_glyph_base(
        GlyphTrainingConfig(steps=1, batch=2, height=24, width=48, letters=6), tmp_path / "wide"
    )
    model = load_model(tmp_path / "wide")
    assert model.latent_shape == (1, 24, 48)
    assert json.loads((tmp_path / "wide" / "glyph.json").read_text()) == {"height": 24, "width": 48}
    assert velocity(model).shape == (2, 1, 24, 48)
    assert len(model.tokenizer("ABCDEF", truncation=True).input_ids) == 8


def test_more_letters_than_the_model_draws_are_an_error(model):
    with pytest.raises(ModelError, match="4 letters at most and was asked for 'ABCDE'"):
        model.encode_texts(["AB", "ABCDE"])
