import importlib.metadata

import numpy as np
import pytest
from reward_cases import as_prompt, as_rgb

from ebbflow.data.prompts import make_glyph_prompts
from ebbflow.models.glyph_training.lettering import render_text
from ebbflow.recipe.model import CHARACTERS
from ebbflow.rewards import ppocr
from ebbflow.rewards.built_in.ocr import Ocr, OcrConfig


def test_ocr_reads_clean_renderings(clean):
    result = Ocr()(*clean)
    assert result.values.mean() >= 0.97
    assert result.metrics["exact_match"].mean() >= 0.9
    assert not result.failures


def test_is_not_told_the_alphabet():
    # Were it restricted to capitals it would find some in here.
    texts = ["ab12", "x-7", "50%"]
    images = as_rgb(np.stack([render_text(text, 32, 64) for text in texts]))
    assert ppocr.read_lines_of_text(images) == texts


@pytest.mark.parametrize("alphabet", CHARACTERS.values(), ids=CHARACTERS)
def test_tells_small_letters_from_capitals(alphabet):
    """Of clean renderings it reads hardly one letter in the other case, so that a policy cannot
    pass one off as the other.
    """
    texts = [row.target for row in make_glyph_prompts(48, 4, 0, [alphabet])]
    images = as_rgb(np.stack([render_text(text, 16, 32) for text in texts]))
    prompts = [as_prompt(index, text) for index, text in enumerate(texts)]
    swapped = [as_prompt(index, text.swapcase()) for index, text in enumerate(texts)]
    kept = Ocr(OcrConfig(case="kept"))
    assert kept(images, prompts).values.mean() >= 0.98
    if alphabet.isalpha():
        assert kept(images, swapped).values.mean() <= 0.05
        assert Ocr()(images, swapped).values.mean() >= 0.98


def test_another_text_than_asked_for_scores_low(clean):
    images, prompts = clean
    assert Ocr()(images, prompts[1:] + prompts[:1]).values.mean() < 0.2


def test_finds_nothing_where_nothing_is(empty):
    result = Ocr()(empty, [as_prompt(index, "WXYZ") for index in range(len(empty))])
    assert np.all(result.values[:3] == 0)
    assert result.values.mean() <= 0.1


def test_scores_do_not_depend_on_the_batch(clean):
    images, _ = clean
    texts = ppocr.read_lines_of_text(images)
    order = np.random.default_rng(0).permutation(len(images))
    assert ppocr.read_lines_of_text(images[order]) == [texts[index] for index in order]
    assert [ppocr.read_lines_of_text(images[index : index + 1])[0] for index in range(5)] == texts[
        :5
    ]
    assert ppocr.read_lines_of_text(images[:0]) == []


@pytest.mark.parametrize(("height", "width"), [(24, 96), (64, 128), (96, 96), (64, 24)])
def test_reads_images_of_other_shapes(height, width):
    text = "OK" if width <= height else "HELLO"
    assert ppocr.read_lines_of_text(as_rgb(render_text(text, height, width)[None])) == [text]


def test_prepared_images_are_bgr_in_unit_range_and_at_least_square():
    images = np.zeros((1, 32, 16, 3), np.uint8)
    images[..., 0] = 255
    prepared = ppocr.prepare_line_images(images)
    assert (prepared.shape, prepared.dtype) == ((1, 3, 48, 48), np.float32)
    assert np.allclose(prepared[0, :, 0, 0], [-1, -1, 1])
    assert np.allclose(prepared[0, :, 0, 40], [1, 1, 1])


def test_decoding_agrees_with_rapidocr():
    decoder = pytest.importorskip("rapidocr.ch_ppocr_rec.utils").CTCLabelDecode
    _, characters = ppocr._load_recogniser()
    theirs = decoder(character=list(characters[1:-1]))
    assert theirs.character[1:] == characters[1:]
    rng = np.random.default_rng(0)
    classes = rng.choice([0, 0, 1, 30, 31, len(characters) - 1], (200, 12))
    scores = np.zeros((200, 12, len(characters)), np.float32)
    np.put_along_axis(scores, classes[..., None], 1.0, axis=2)
    assert ppocr.decode_ctc(classes, characters) == [text for text, _ in theirs(scores)[0]]


def test_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    assert "constraints.txt" in Ocr().explain_unavailable()

    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", not_installed)
    assert "pip install 'ebbflow[ocr]'" in Ocr().explain_unavailable()


def test_is_available_where_the_tests_run():
    assert Ocr().explain_unavailable() is None
